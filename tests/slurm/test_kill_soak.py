"""A job on two nodes whose ranks, srun and nodes are killed at random moments ends as one that nobody killed.

It runs where ``GENLIGHT_KILLS`` says how often; a kill costs half a minute, most of which Slurm waits.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from genlight.reporters.events.validation import validate_events

pytestmark = [
    pytest.mark.promise(name="resume"),
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif("GENLIGHT_KILLS" not in os.environ, reason="GENLIGHT_KILLS=N asks for N kills"),
]

DIGITS = Path(__file__).parents[2] / "examples/digits"
STEPS, CADENCE, STEP_S = 150, 2, 0.1
NODES = ("n9", "n10")

TRAINER = f"""
import os, time
from pathlib import Path
from trainer import DigitsTrainer


class Soaked(DigitsTrainer):
    def setup(self, ctx):
        Path(f"pid-{{ctx.rank}}").write_text(str(os.getpid()))
        super().setup(ctx)

    def train_step(self, batch, state, ctx):
        if ctx.job.run_id == "soaked":
            time.sleep({STEP_S})
        return super().train_step(batch, state, ctx)
"""


class Job:
    """One run of the digits job on both nodes, submitted again as often as it takes."""

    def __init__(self, slurm, folder, run_id):
        self.slurm, self.folder, self.run_id = slurm, folder, run_id
        job = json.loads((DIGITS / "job.json").read_text())
        job |= {"run_id": run_id, "trainer": "soaked:Soaked", "max_steps": STEPS, "checkpoint_every": CADENCE}
        job |= {"metric_every": 1, "sample_every": 0, "sample_prompts": [], "lightning": {"accelerator": "cpu"}}
        job["dataset"] |= {"parquet_paths": [str(DIGITS / "digits.parquet")], "batch_size": 60}
        job["hyperparams"] |= {"width": 16, "depth": 1}
        (folder / f"{run_id}.json").write_text(json.dumps(job))
        self.events = folder / f"runs/{run_id}/metrics/events.jsonl"
        self.submissions = 0

    def submit(self):
        self.submissions += 1
        command = ["-m", "genlight.adapter.cli", "slurm", "submit", f"{self.run_id}.json", "--nodes=2"]
        self.id = self.slurm.call(sys.executable, *command, cwd=self.folder).strip()

    def state(self):
        return self.slurm.job(self.id, "JobState")

    def has_ended(self):
        return self.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")

    def size(self):
        return self.events.stat().st_size if self.events.exists() else 0

    def ranks(self):
        """The processes of the ranks that train, by rank."""
        found = {}
        for rank in range(2):
            with contextlib.suppress(FileNotFoundError, ValueError, psutil.Error):
                process = psutil.Process(int((self.folder / f"pid-{rank}").read_text()))
                if self.is_mine(process):
                    found[rank] = process
        return found

    def is_mine(self, process):
        """An id that was noted may be another process's by now, and another cluster's jobs have the same numbers."""
        environ = process.environ()
        wanted = {"SLURM_CONF": self.slurm.environ["SLURM_CONF"], "SLURM_JOB_ID": self.id}
        return wanted.items() <= environ.items()

    def kill(self, kind, chance):
        """Hit what there is of that kind; whether there was any."""
        ranks = self.ranks()
        if not ranks:
            return False
        rank = chance.choice(sorted(ranks))
        process = ranks[rank]
        with contextlib.suppress(psutil.NoSuchProcess):
            if kind == "rank":
                return _killed(process)
            if kind == "srun":
                steps = [each for each in psutil.process_iter() if each.name() == "srun" and self.is_mine(each)]
                return [_killed(each) for each in steps] != []
            step = process.parent()
            self.slurm.kill_node(NODES[rank])
            hit = step.name().startswith("slurmstepd") and _killed(step) and _killed(process)
            # A node that came back before it was missed would leave srun waiting for a task that is no more.
            self.slurm.until(lambda: "down" in str(self.slurm.states_of_nodes()), "the node is missed")
            self.slurm.start_node(NODES[rank])
            return hit
        return False

    def weights(self):
        return (self.folder / f"runs/{self.run_id}/checkpoints/final/model.safetensors").read_bytes()

    def output(self):
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("*.out")))


def _killed(process):
    process.send_signal(signal.SIGKILL)
    return True


def test_a_job_on_two_nodes_killed_again_and_again_ends_with_the_same_weights(slurm, tmp_path, capsys):
    kills = int(os.environ["GENLIGHT_KILLS"])
    chance = random.Random(kills)
    (tmp_path / "trainer.py").write_text((DIGITS / "trainer.py").read_text())
    (tmp_path / "soaked.py").write_text(TRAINER)
    reference = Job(slurm, tmp_path, "straight")
    reference.submit()
    assert slurm.wait(reference.id) == ("COMPLETED", 0), reference.output()

    job, done, began = Job(slurm, tmp_path, "soaked"), Counter(), time.monotonic()
    job.submit()
    while True:
        size, until = job.size(), time.monotonic() + 240
        grows = chance.uniform(500, 5000)
        while job.size() < size + grows and not job.has_ended():
            assert time.monotonic() < until, job.output() + slurm.logs()
            time.sleep(0.2)
        if job.has_ended():
            if job.state() == "COMPLETED":
                break
            job.submit()
        elif done.total() < kills:
            kind = chance.choice(("rank", "rank", "srun", "node"))
            done[kind] += job.kill(kind, chance)
    assert job.weights() == reference.weights()
    assert validate_events(job.events) == []
    with capsys.disabled():
        took_s = time.monotonic() - began
        print(f"\n{done.total()} kills {dict(done)}, {job.submissions} submissions, {took_s:.0f} s, equal at the end")
