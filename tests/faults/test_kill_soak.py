"""The digits job, killed at random moments and started again, leaves the bytes of an uninterrupted run.

`genlight run --restarts` forks one rank or two, with and without checkpoints in memory, in turns.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import time
from pathlib import Path

import psutil
import pytest

from genlight.callbacks.checkpoint import list_checkpoints, verify
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support.forked import Forked

pytestmark = [
    pytest.mark.promise(name="resume"),
    pytest.mark.slow,
    pytest.mark.timeout(7200),  # The long run kills 500 times.
]

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
STEPS, CADENCE = 100, 20
LIMIT_S = 200
"""Longer than a hanging job takes to write its stacks."""
RUN_ID = f"soak-{os.getpid()}"
MEMORY_EVERY = (1, 0)
"""Steps between checkpoints in memory, in one run after the other."""


def write_job(folder, ranks):
    """Write the job of the digits example, small enough to be killed repeatedly, and its trainer."""
    job = json.loads((DIGITS / "job.json").read_text())
    job |= {"run_id": RUN_ID, "max_steps": STEPS, "checkpoint_every": CADENCE, "metric_every": 1, "sample_every": 0}
    job |= {"resume_from_latest": True, "sample_prompts": [], "lightning": {"accelerator": "cpu"}}
    job["lightning"] |= {"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}
    job["hyperparams"] |= {"width": 32, "depth": 2, "warmup_steps": 5}
    job["dataset"] |= {"parquet_paths": [str(DIGITS / "digits.parquet")], "batch_size": 120 // ranks}
    shutil.copy(DIGITS / "trainer.py", folder)
    (folder / "job.json").write_text(json.dumps(job))


class Run:
    """One artifacts directory, from the first start to the end."""

    def __init__(self, folder, name):
        self.folder, self.artifacts, self.log = folder, folder / name, folder / f"{name}-log"
        self.events = self.artifacts / "metrics" / "events.jsonl"

    def start(self, memory_every):
        settings = ("--set", f"checkpoints.memory_every_n_steps={memory_every}")
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINER_ARTIFACTS_DIR": str(self.artifacts)}
        self.job = Forked(
            "genlight.adapter.cli", "run", "job.json", "--restarts", "100000", *settings,
            environ=environ, folder=self.folder, log=self.log,
        )  # fmt: skip

    def kill(self, chance):
        """Kill one or all ranks of the supervisor; return whether there were any."""
        end = time.monotonic() + LIMIT_S
        while self.job.poll() is None:
            assert time.monotonic() < end, self.output()
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks = psutil.Process(self.job.pid).children()
                victims = ranks if chance.random() < 0.3 else ranks[:1] if chance.random() < 0.5 else ranks[1:]
                for process in victims:
                    process.kill()
                if victims:
                    return True
            time.sleep(0.001)
        return False

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

    def digests(self):
        """Digests of the model's and the trainer's files."""
        final = self.artifacts / "checkpoints" / "final"
        files = [final / "model.safetensors", final / "trainer" / "digits.safetensors"]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

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

    def assert_nothing_is_left(self):
        """Check that only complete checkpoints and a valid event log remain, and no temporary file."""
        assert validate_events(self.events) == []
        checkpoints = self.artifacts / "checkpoints"
        kept = [listed.path for listed in list_checkpoints(checkpoints)]
        for path in kept:
            verify(path)
        # A kill between the last commit and the removal of an old checkpoint leaves both; no step remains to train.
        assert [path.stem for path in kept][-3:] == [f"step-{STEPS - CADENCE:08d}", f"step-{STEPS:08d}", "final"]
        assert len(kept) <= 4
        assert sorted(os.listdir(checkpoints)) == sorted([".witness", *(p.stem for p in kept), *(p.name for p in kept)])
        proofs = [event for event in read_events(self.events) if event["event"] == "finding"]
        assert [proof["text"] for proof in proofs if proof["level"] != "ok"] == [], "a restart repeats its steps"
        assert [path for path in self.artifacts.rglob("*") if path.name.startswith(".tmp-")] == []


@pytest.fixture
def new_run(tmp_path):
    made = []

    def make():
        made.append(Run(tmp_path, f"run{len(made)}"))
        return made[-1]

    yield make
    for run in made:
        run.job.kill_session()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_killed_again_and_again_ends_with_the_same_weights(ranks, new_run, tmp_path, is_long):
    """`GENLIGHT_KILLS` is the number of kills, and makes the test as long as there is time for."""
    kills = int(os.environ.get("GENLIGHT_KILLS", 500 if is_long else 4))
    write_job(tmp_path, ranks)
    whole = new_run()
    whole.start(0)
    assert whole.job.wait(LIMIT_S) == 0, whole.output()

    done, runs = 0, 0
    while done < kills:
        run, chance, quick, memory_every = new_run(), random.Random(done * 1000 + runs), 0, MEMORY_EVERY[runs % 2]
        runs += 1
        run.start(memory_every)
        run.wait_for_growth(1)
        of_run = 0
        while run.job.poll() is None and done < kills and of_run < max(2, kills // 20):
            # One kill in four comes while the job starts again, but only two in a row: after four the run ends.
            quick = quick + 1 if chance.random() < 0.25 and quick < 2 else 0
            if not quick:
                run.wait_for_growth(chance.uniform(0.01, 0.15) * whole.size())
            time.sleep(chance.uniform(0, 0.5 if quick else 0.05))
            killed = run.kill(chance)
            done, of_run = done + killed, of_run + killed
        while (code := run.job.wait(LIMIT_S)) != 0:
            # Kills at random moments may hit the same step three times in a row.
            assert code == 1, run.output()
            assert "attempts in a row were killed" in list(read_events(run.events))[-1]["error"], run.output()
            shutil.rmtree(run.artifacts / ".deaths")
            run.start(memory_every)
        assert run.digests() == whole.digests()
        run.assert_nothing_is_left()
        # A save waits for the previous one: at most one is in flight, and at most one more is due.
        assert max(run.steps_lost(), default=0) <= 2 * CADENCE
        shutil.rmtree(run.artifacts)
    assert sorted(Path("/dev/shm").glob(f"genlight-{RUN_ID}-*")) == []
