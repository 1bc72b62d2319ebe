"""The digits job on two ranks of torchrun: ranks, the launcher, or all of them are killed at random moments.

The run always ends with the bytes of an uninterrupted run.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from genlight.callbacks.checkpoint import list_checkpoints, verify
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support.digits_job import digests_of_final, write_digits_job
from support.forked import fork_server

pytestmark = pytest.mark.promise(name="resume")

HERE = Path(__file__).parent
STEPS, CADENCE = 120, 2
LIMIT_S = 200
KINDS = ("rank", "rank", "launcher", "node")
"""Targets of a kill; a rank is hit as often as the other two together."""


class Run:
    """One artifacts directory, from the first start of torchrun to the end."""

    def __init__(self, folder, name, max_restarts):
        self.folder, self.name, self.max_restarts = folder, name, max_restarts
        self.artifacts = folder / name
        self.processes = folder / f"{name}-processes"
        self.processes.mkdir()
        self.log = folder / f"{name}-log"
        self.events = self.artifacts / "metrics/events.jsonl"
        self.launcher = None

    def start(self):
        job = [fork_server(), self.log, self.folder / "job.json", self.processes]
        options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={self.max_restarts}", "--no-python"]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options,
            sys.executable,
            HERE / "forked_job.py",
            *job,
        ]
        environ = {**os.environ, "TRAINER_ARTIFACTS_DIR": str(self.artifacts)}
        with self.log.open("ab") as log:
            self.launcher = subprocess.Popen(list(map(str, command)), env=environ, stdout=log, stderr=log)

    def ranks(self):
        """Return the live ranks; the id of an ended rank may belong to another process by now."""
        alive = []
        for note in self.processes.iterdir():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(note.name.split("-")[1]))
                if self.is_mine(process):
                    alive.append(process)
                    continue
            note.unlink()
        return alive

    def is_mine(self, process):
        """Whether a process writes to this log; ranks share command line and environment with the fork server."""
        return any(Path(f"/proc/{process.pid}/fd/{number}").resolve() == self.log for number in (1, 2))

    def kill(self, kind, chance):
        """Kill the processes of that kind; return whether there were any."""
        ranks = self.ranks()
        victims = {"rank": chance.sample(ranks, min(1, len(ranks))), "launcher": [], "node": ranks}[kind]
        if kind != "rank":
            victims = [self.launcher, *victims]
        hit = 0
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                hit += 1
        if kind != "rank":
            self.launcher.wait()
            self.start()
        return hit > 0

    def size(self):
        return self.events.stat().st_size if self.events.exists() else 0

    def wait_for_growth(self, growth):
        """Wait until the event log has grown by `growth` bytes; return False if the launcher ended first."""
        size, end = self.size(), time.monotonic() + LIMIT_S
        while self.size() < size + growth:
            assert time.monotonic() < end, self.tail()
            if self.launcher.poll() is not None:
                return False
            time.sleep(0.005)
        return True

    def tail(self):
        return self.log.read_text(errors="replace")[-8000:]

    def end(self):
        """Kill all processes of the run."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        for process in self.ranks():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def new_run(tmp_path):
    made = []
    write_digits_job(tmp_path, steps=STEPS, cadence=CADENCE, batch_size=60, lightning={"strategy": "ddp"})

    def make(name, max_restarts=1000):
        made.append(Run(tmp_path, name, max_restarts))
        return made[-1]

    yield make
    for run in made:
        run.end()


@pytest.mark.slow
@pytest.mark.timeout(7200)  # The long run kills 100 times.
def test_a_job_of_torchrun_killed_again_and_again_ends_with_the_same_weights(new_run, is_long, report):
    kills = int(os.environ.get("GENLIGHT_KILLS", 100 if is_long else 3))
    chance = random.Random(kills)
    reference = new_run("reference", max_restarts=0)
    reference.start()
    assert reference.launcher.wait(LIMIT_S) == 0, reference.tail()
    full_size = reference.size()

    done, runs = Counter(), 0
    began = time.monotonic()
    while done.total() < kills:
        runs += 1
        run = new_run(f"run{runs}")
        run.start()
        while done.total() < kills:
            kind = chance.choice(KINDS)
            # Three kills of four come while it trains, the others while it starts or ends.
            grows = run.wait_for_growth(chance.uniform(0.02, 0.15) * full_size if chance.random() < 0.75 else 1)
            time.sleep(chance.uniform(0, 0.1 if grows else 0))
            if run.launcher.poll() is not None:
                break
            done[kind] += run.kill(kind, chance)
        assert run.launcher.wait(LIMIT_S) == 0, run.tail()
        assert digests_of_final(run.artifacts) == digests_of_final(reference.artifacts)
        assert validate_events(run.events) == []
        for listed in list_checkpoints(run.artifacts / "checkpoints"):
            verify(listed.path)
        ends = Counter(
            event.get("category", event["event"])
            for event in read_events(run.events)
            if event["event"] in ("completed", "failed")
        )
        assert ends["completed"] >= 1
        # No start failed because of files that an earlier one had left.
        assert ends.keys() <= {"completed", "train-step", "preempted"}, run.tail()
        took_s = time.monotonic() - began
        report(
            f"{done.total()} kills {dict(done)} in {runs} runs, {took_s:.0f} s, all equal; attempts ended {dict(ends)}"
        )
