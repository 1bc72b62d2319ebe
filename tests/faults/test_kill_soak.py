"""The digits job, killed at random times and resumed until it completes, leaves the bytes of an uninterrupted run.

It runs on one process, and on two that Lightning's launcher starts; a kill hits one of them or both.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from genlight.callbacks.checkpoint import list_checkpoints, verify
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support.digits_job import digests_of_final, write_digits_job
from support.forked import fork_server

pytestmark = pytest.mark.promise(name="resume")

HERE = Path(__file__).parent
STEPS, CADENCE = 40, 2
LIMIT_S = 180
"""Longer than a hanging job takes to write its stacks."""


@dataclass
class Run:
    """One artifacts directory, from the first start to the end."""

    spec: Path
    artifacts: Path
    started_pids: set = field(default_factory=set)

    def start(self):
        self.processes = self.artifacts.with_name(f"{self.artifacts.name}-attempt")
        self.processes.mkdir(exist_ok=True)
        for note in self.processes.iterdir():
            note.unlink()
        self.log = self.artifacts.with_name(f"{self.artifacts.name}-log")
        job = [fork_server(), self.log, self.spec, self.processes]
        command = [sys.executable, HERE / "forked_job.py", *job]
        environ = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "TRAINER_ARTIFACTS_DIR": str(self.artifacts)}
        return subprocess.Popen(command, env=environ)

    def ranks(self):
        """Return the process ids of the ranks that have started."""
        named = dict(map(int, note.name.split("-")) for note in self.processes.iterdir())
        self.started_pids |= set(named.values())
        return named

    def kill(self, chance):
        """Kill a random rank or all ranks; return the ranks that were killed."""
        victims = self.ranks()
        if chance.random() < 0.7:
            victims = dict(chance.sample(sorted(victims.items()), min(1, len(victims))))
        for pid in victims.values():
            with contextlib.suppress(ProcessLookupError):  # It may have ended by itself.
                os.kill(pid, signal.SIGKILL)
        return set(victims)

    def attempt(self, chance=None, reference=None):
        """Start the job, kill it at a random moment if there is a `chance`; return whether it completed.

        One kill in four comes while the job starts, the others while it trains. The size of the event log sets the
        moment, because a busy machine is slower.
        """
        job, victims = self.start(), set()
        if chance is not None:
            growth = chance.uniform(0, reference.log_size()) if chance.random() < 0.75 else 0
            self.wait_for_growth(job, growth)
            time.sleep(chance.uniform(0, 0.05 if growth else 0.5))
            victims = self.kill(chance)
        status = job.wait(LIMIT_S)
        self.ranks()
        if status == 0:
            return True
        # If only the other rank is killed, rank zero reports it and then ends by itself.
        assert victims, self.log.read_text()
        assert status == (-signal.SIGKILL if 0 in victims else 1), self.log.read_text()
        return False

    @property
    def events(self):
        return self.artifacts / "metrics" / "events.jsonl"

    def log_size(self):
        return self.events.stat().st_size if self.events.exists() else 0

    def wait_for_growth(self, job, growth):
        """Wait until the event log has grown by `growth` bytes, or the job has ended."""
        size, end = self.log_size(), time.monotonic() + LIMIT_S
        while self.log_size() < size + growth and job.poll() is None:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.002)

    def steps_lost(self):
        """Return, for each resume, how many steps of the previous attempt were trained again."""
        attempts = []
        for event in read_events(self.events):
            if event["event"] == "started":
                attempts.append({"from": 0, "to": 0})
            elif event["event"] == "metric":
                attempts[-1]["to"] = event["step"]
                if event["name"] == "trainer/resumed_from_step":
                    attempts[-1]["from"] = event["step"]
        trained = [attempt for attempt in attempts if attempt["to"]]
        return [before["to"] - after["from"] for before, after in itertools.pairwise(trained)]


@pytest.fixture
def kills(is_long):
    """Number of kills; `GENLIGHT_KILLS` makes a run as long as there is time for."""
    return int(os.environ.get("GENLIGHT_KILLS", 1000 if is_long else 8))


@pytest.fixture(params=[1, 2])
def ranks(request):
    return request.param


@pytest.fixture
def spec(ranks, tmp_path):
    lightning = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    return write_digits_job(tmp_path, steps=STEPS, cadence=CADENCE, batch_size=120 // ranks, lightning=lightning)


def assert_nothing_is_left(run):
    """Check that only complete checkpoints and a valid event log remain: no temporary file, and no process."""
    assert validate_events(run.events) == []
    checkpoints = run.artifacts / "checkpoints"
    kept = [listed.path for listed in list_checkpoints(checkpoints)]
    for path in kept:
        verify(path)
    # A kill after the last commit and before the removal of an old checkpoint leaves both; no step remains to train.
    assert [path.stem for path in kept][-3:] == [f"step-{STEPS - CADENCE:08d}", f"step-{STEPS:08d}", "final"]
    assert len(kept) <= 4
    assert sorted(os.listdir(checkpoints)) == sorted([".witness", *(p.stem for p in kept), *(p.name for p in kept)])
    proofs = [event for event in read_events(run.events) if event["event"] == "finding"]
    assert [proof["text"] for proof in proofs if proof["level"] != "ok"] == [], "a restart repeats its steps"
    assert [path for path in run.artifacts.rglob("*") if path.name.startswith((".tmp-", ".ranks"))] == []
    end = time.monotonic() + LIMIT_S
    while alive := [pid for pid in run.started_pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(7200)  # The long run kills 1,000 times.
def test_the_digits_job_killed_again_and_again_ends_with_the_same_weights(ranks, spec, tmp_path, kills, report):
    def new_run(name):
        return Run(spec, tmp_path / name)

    reference = new_run("reference")
    assert reference.attempt()

    done, runs, lost = 0, 0, []
    while done < kills:
        runs += 1
        run, is_done = new_run(f"run{runs}"), False
        while not is_done:
            is_done = run.attempt(random.Random(done * 1000 + runs) if done < kills else None, reference)
            done += not is_done
        assert digests_of_final(run.artifacts) == digests_of_final(reference.artifacts)
        assert_nothing_is_left(run)
        lost += run.steps_lost()
        # A save waits for the previous one: at most one is in flight, and at most one more is due.
        assert max(lost, default=0) <= 2 * CADENCE
        report(
            f"{ranks} ranks: {done} kills, {runs} runs, {len(lost)} resumes, at most {max(lost, default=0)} steps lost"
        )
        shutil.rmtree(run.artifacts)
