"""The digits job, killed at random moments and resumed until it completes, leaves the bytes of an uninterrupted run.

It runs on one process, on two that Lightning's launcher starts, on two of torchrun, and on one and two that ``genlight
run --restarts`` forks, with and without checkpoints in memory. A kill hits a rank, all ranks, or torchrun as well,
which is then started again.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
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
from support.forked import Forked, fork_server

pytestmark = [
    pytest.mark.promise(name="resume"),
    pytest.mark.slow,
    pytest.mark.timeout(7200),  # The long run kills 1,000 times.
]

HERE = Path(__file__).parent
CADENCE = 2
LIMIT_S = 200
"""Longer than a hanging job takes to write its stacks."""
KINDS = ("rank", "rank", "launcher", "node")
"""Targets of a kill under torchrun; a rank is hit as often as the other two together."""


class Run:
    """One artifacts directory, from the first start to the end."""

    def __init__(self, folder, name, *, restarts=None):
        self.folder, self.restarts = folder, restarts
        self.artifacts, self.log = folder / name, folder / f"{name}-log"
        self.processes = folder / f"{name}-processes"
        self.processes.mkdir()
        self.events = self.artifacts / "metrics" / "events.jsonl"
        self.started_pids, self.job = set(), None

    def start(self):
        """Start the job, under torchrun if the run has a number of restarts."""
        command = [sys.executable, HERE / "forked_job.py"]
        if self.restarts is not None:
            options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={self.restarts}", "--no-python"]
            command = [sys.executable, "-m", "torch.distributed.run", *options, *command]
        command += [fork_server(), self.log, self.folder / "job.json", self.processes]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINER_ARTIFACTS_DIR": str(self.artifacts)}
        with self.log.open("ab") as log:
            self.job = subprocess.Popen(list(map(str, command)), env=environ, stdout=log, stderr=log)

    def start_supervised(self, memory_every):
        """Start the job by ``genlight run --restarts``."""
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINER_ARTIFACTS_DIR": str(self.artifacts)}
        memory = ["--set", f"run_id={RUN_ID}", "--set", f"checkpoints.memory_every_n_steps={memory_every}"]
        self.job = Forked(
            "genlight.adapter.cli", "run", "job.json", "--restarts", "100000", *memory,
            environ=environ, folder=self.folder, log=self.log,
        )  # fmt: skip

    def kill_supervised(self, chance):
        """Kill one or all ranks of a supervisor; return how many."""
        end = time.monotonic() + LIMIT_S
        while self.job.poll() is None:
            assert time.monotonic() < end, self.output()
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks = psutil.Process(self.job.pid).children()
                victims = ranks if chance.random() < 0.3 else ranks[:1] if chance.random() < 0.5 else ranks[1:]
                for process in victims:
                    process.kill()
                if victims:
                    return len(victims)
            time.sleep(0.001)
        return 0

    def ranks(self):
        """Return the live processes by rank; the id of an ended one may belong to another process by now."""
        alive = {}
        for note in self.processes.iterdir():
            rank, pid = map(int, note.name.split("-"))
            self.started_pids.add(pid)
            with contextlib.suppress(psutil.Error):
                if self.is_mine(process := psutil.Process(pid)):
                    alive[rank] = process
                    continue
            note.unlink()
        return alive

    def is_mine(self, process):
        """Whether a process writes to this log; ranks share command line and environment with the fork server."""
        return any(Path(f"/proc/{process.pid}/fd/{number}").resolve() == self.log for number in (1, 2))

    def kill(self, kind, chance):
        """Kill processes of that kind; return the ranks that were hit."""
        ranks = self.ranks()
        victims = dict(chance.sample(sorted(ranks.items()), min(1, len(ranks)))) if kind == "rank" else ranks
        if kind in ("launcher", "node"):
            self.job.kill()
        for process in victims.values() if kind != "launcher" else ():
            with contextlib.suppress(psutil.NoSuchProcess):  # It may have ended by itself.
                process.kill()
        return set(victims)

    def size(self):
        return self.events.stat().st_size if self.events.exists() else 0

    def wait_for_growth(self, growth):
        """Wait until the event log has grown by `growth` bytes, or the job has ended; a busy machine is slower."""
        size, end = self.size(), time.monotonic() + LIMIT_S
        while self.size() < size + growth and self.job.poll() is None:
            assert time.monotonic() < end, self.output()
            time.sleep(0.002)

    def output(self):
        return self.log.read_text(errors="replace")[-8000:]

    def end(self):
        """Kill all processes of the run."""
        if self.job is not None and self.job.poll() is None:
            self.job.kill()
            self.job.wait()
        for process in self.ranks().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

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
def new_run(tmp_path):
    made = []

    def make(**options):
        made.append(Run(tmp_path, f"run{len(made)}", **options))
        return made[-1]

    yield make
    for run in made:
        run.end()


def wait_for_the_end(run):
    run.start()
    assert run.job.wait(LIMIT_S) == 0, run.output()
    return digests_of_final(run.artifacts), run.size()


def save_in_memory(job):
    """Let the job save in memory after each step that is not saved on disk."""
    settings = json.loads(job.read_text())
    job.write_text(json.dumps({**settings, "checkpoints": {"memory_every_n_steps": 1}}))


def kills_of(is_long, long, short):
    """Number of kills; `GENLIGHT_KILLS` makes a run as long as there is time for."""
    return int(os.environ.get("GENLIGHT_KILLS", long if is_long else short))


def assert_nothing_is_left(run, steps):
    """Check that only complete checkpoints and a valid event log remain: no temporary file, and no process."""
    assert validate_events(run.events) == []
    checkpoints = run.artifacts / "checkpoints"
    kept = [listed.path for listed in list_checkpoints(checkpoints)]
    for path in kept:
        verify(path)
    # A kill after the last commit and before the removal of an old checkpoint leaves both; no step remains to train.
    assert [path.stem for path in kept][-3:] == [f"step-{steps - CADENCE:08d}", f"step-{steps:08d}", "final"]
    assert len(kept) <= 4
    assert sorted(os.listdir(checkpoints)) == sorted([".witness", *(p.stem for p in kept), *(p.name for p in kept)])
    proofs = [event for event in read_events(run.events) if event["event"] == "finding"]
    assert [proof["text"] for proof in proofs if proof["level"] != "ok"] == [], "a restart repeats its steps"
    assert [path for path in run.artifacts.rglob("*") if path.name.startswith((".tmp-", ".ranks"))] == []
    end = time.monotonic() + LIMIT_S
    while alive := [pid for pid in run.started_pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_digits_job_killed_again_and_again_ends_with_the_same_weights(ranks, new_run, tmp_path, is_long, report):
    if ranks == 1 and not is_long:
        pytest.skip("the short run kills one process under its supervisor")
    steps, kills = 40, kills_of(is_long, 1000, 5)
    lightning = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    job = write_digits_job(tmp_path, steps=steps, cadence=CADENCE, batch_size=120 // ranks, lightning=lightning)
    save_in_memory(job)
    expected, full_size = wait_for_the_end(new_run())

    done, runs, lost = 0, 0, []
    while done < kills:
        run, status = new_run(), None
        runs += 1
        while status != 0:
            run.start()
            victims = set()
            if done < kills:
                # One kill in four comes while the job starts, the others while it trains.
                chance = random.Random(done * 1000 + runs)
                growth = chance.uniform(0, full_size) if chance.random() < 0.75 else 0
                run.wait_for_growth(growth)
                time.sleep(chance.uniform(0, 0.05 if growth else 0.5))
                victims = run.kill("rank" if chance.random() < 0.7 else "all", chance)
            status = run.job.wait(LIMIT_S)
            run.ranks()
            done += status != 0
            # If only the other rank is killed, rank zero reports it and then ends by itself.
            assert status == 0 or (victims and status == (-signal.SIGKILL if 0 in victims else 1)), run.output()
        assert digests_of_final(run.artifacts) == expected
        assert_nothing_is_left(run, steps)
        lost += run.steps_lost()
        # A save waits for the previous one: at most one is in flight, and at most one more is due.
        assert max(lost, default=0) <= 2 * CADENCE
        most = max(lost, default=0)
        report(f"{ranks} ranks: {done} kills, {runs} runs, {len(lost)} resumes, at most {most} steps lost")
        shutil.rmtree(run.artifacts)


RUN_ID = f"soak-{os.getpid()}"
MEMORY_EVERY = (1, 0)
"""Steps between checkpoints in memory, in one run after the other."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_supervised_job_killed_again_and_again_ends_with_the_same_weights(
    ranks, new_run, tmp_path, is_long, report, monkeypatch
):
    steps, cadence, kills = 100, 20, kills_of(is_long, 500, 4)
    lightning = {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    write_digits_job(tmp_path, steps=steps, cadence=cadence, batch_size=120 // ranks, lightning=lightning)
    whole = new_run()
    whole.start_supervised(0)
    assert whole.job.wait(LIMIT_S) == 0, whole.output()
    expected, full_size = digests_of_final(whole.artifacts), whole.size()

    done, runs, refused = 0, 0, 0
    lost, seconds = {every: [] for every in MEMORY_EVERY}, []
    while done < kills:
        run, chance, quick, memory_every = new_run(), random.Random(done * 1000 + runs), 0, MEMORY_EVERY[runs % 2]
        runs += 1
        run.start_supervised(memory_every)
        run.wait_for_growth(1)
        of_run = 0
        while run.job.poll() is None and done < kills and of_run < max(2, kills // 20):
            # One kill in four comes while the job starts again, but only two in a row: after four the run ends.
            quick = quick + 1 if chance.random() < 0.25 and quick < 2 else 0
            if not quick:
                run.wait_for_growth(chance.uniform(0.01, 0.15) * full_size)
            time.sleep(chance.uniform(0, 0.5 if quick else 0.05))
            killed = run.kill_supervised(chance)
            done, of_run = done + bool(killed), of_run + bool(killed)
        while (code := run.job.wait(LIMIT_S)) != 0:
            # Kills at random moments may hit the same step three times in a row.
            assert code == 1, run.output()
            assert "attempts in a row were killed" in list(read_events(run.events))[-1]["error"], run.output()
            refused += 1
            shutil.rmtree(run.artifacts / ".deaths")
            run.start_supervised(memory_every)
        assert digests_of_final(run.artifacts) == expected
        assert validate_events(run.events) == []
        assert not (run.artifacts / "checkpoints" / ".memory").exists()
        lost[memory_every] += run.steps_lost()
        events = read_events(run.events)
        seconds += [event["value"] for event in events if event.get("name") == "restart/seconds"]
        parts = [f"{'memory' if every else 'disk'}: {spread(steps)} steps lost" for every, steps in lost.items()]
        text = f"{'; '.join(parts)}; {spread(seconds)} s until the next batch; {refused} runs ended themselves"
        report(f"{ranks} ranks: {done} kills, {runs} runs, {len(seconds)} restarts; {text}")
        shutil.rmtree(run.artifacts)
    assert sorted(Path("/dev/shm").glob(f"genlight-{RUN_ID}-*")) == []


def spread(values):
    """Return median, 95th percentile and maximum, in words."""
    ordered = sorted(values) or [0]
    chosen = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 1)]
    return "{:.3g} (95 %: {:.3g}; at most {:.3g})".format(*chosen)


def test_a_job_of_torchrun_killed_again_and_again_ends_with_the_same_weights(new_run, tmp_path, is_long, report):
    kills = kills_of(is_long, 100, 2)
    save_in_memory(write_digits_job(tmp_path, steps=120, cadence=CADENCE, batch_size=60, lightning={"strategy": "ddp"}))
    expected, full_size = wait_for_the_end(new_run(restarts=0))

    chance, done, runs = random.Random(kills), Counter(), 0
    while done.total() < kills:
        run = new_run(restarts=1000)
        runs += 1
        run.start()
        while done.total() < kills:
            kind = chance.choice(KINDS)
            # Three kills of four come while it trains, the others while it starts or ends.
            run.wait_for_growth(chance.uniform(0.02, 0.15) * full_size if chance.random() < 0.75 else 1)
            time.sleep(chance.uniform(0, 0.1))
            if run.job.poll() is not None:
                break
            done[kind] += bool(run.kill(kind, chance)) or kind != "rank"
            if kind != "rank":
                run.job.wait()
                run.start()
        assert run.job.wait(LIMIT_S) == 0, run.output()
        assert digests_of_final(run.artifacts) == expected
        assert validate_events(run.events) == []
        for listed in list_checkpoints(run.artifacts / "checkpoints"):
            verify(listed.path)
        events = [event for event in read_events(run.events) if event["event"] in ("completed", "failed")]
        ends = Counter(event.get("category", event["event"]) for event in events)
        assert ends["completed"] >= 1
        # No start failed because of files that an earlier one had left.
        assert ends.keys() <= {"completed", "train-step", "preempted"}, run.output()
        report(f"{done.total()} kills {dict(done)} in {runs} runs, all equal; attempts ended {dict(ends)}")
