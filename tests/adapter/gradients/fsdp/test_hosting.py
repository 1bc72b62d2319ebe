"""A job and a configuration of LightningCLI that shard by FSDP 2, from the command line to the resume."""

from __future__ import annotations

import os

import pytest

from genlight.callbacks.checkpoint import load, newest_valid
from genlight.reporters import read_events
from support import SUPPORT
from support.forked import run_forked
from support.jobs import write_job

pytestmark = [pytest.mark.promise(name="ranks"), pytest.mark.slow]

TRAINER = """
import torch
from support.trainer_class import Trains

class Sharded(Trains):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor([list(raw[name]) for name in "ab"], dtype=torch.float32).T

    def train_step(self, batch, state, ctx):
        assert type(state["model"]).__name__ == "FSDPSequential"
        return super().train_step(batch, state, ctx)
"""
STRATEGY = {"class_path": "genlight.adapter.FSDP2Strategy", "init_args": {"units": ["Linear"]}}
BATCHES = [{"a": [0.1, 0.2 * step, 0.3, 0.4], "b": [0.4, -0.3, 0.2, -0.1 * step]} for step in range(16)]
LIGHTNING = {"accelerator": "cpu", "devices": 2, "strategy": STRATEGY}
JOB = {"trainer": "sharded_trainer:Sharded", "mock_batches": BATCHES, "lightning": LIGHTNING}


@pytest.fixture
def genlight(tmp_path):
    """Return a function that runs a command line in a folder with the trainer."""
    (tmp_path / "sharded_trainer.py").write_text(TRAINER)

    def run(*words):
        path = os.pathsep.join([str(tmp_path), str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = run_forked(*words, folder=tmp_path, environ=environ)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_sharded_job_resumes_on_another_number_of_ranks(genlight, tmp_path):
    write_job(tmp_path, max_steps=2, checkpoint_every=2, **JOB)
    longer = ("--set", "max_steps=4", "--set", "resume_from_latest=true")

    code, out = genlight("run", "job.json")
    assert code == 0, out
    code, out = genlight("run", "job.json", *longer, "--set", "lightning.devices=1")
    assert code == 0, out

    folder = tmp_path / "runs" / "r"
    events = list(read_events(folder / "metrics" / "events.jsonl"))
    assert [event["event"] for event in events if event["event"] in ("completed", "failed")] == ["completed"] * 2
    record, _ = newest_valid(folder / "checkpoints")
    assert record.step == 4
    payload = load(record.path)
    assert payload["global_step"] == 4


def test_doctor_lists_requirements_and_limits_of_fsdp_2(genlight, tmp_path):
    write_job(tmp_path, **JOB)

    code, out = genlight("doctor", "job.json")

    assert code == 0, out
    line_of_fsdp = next(
        line for line in out.splitlines() if "FSDP 2 needs torch>=2.9, `unused_parameters` torch>=2.13" in line
    )
    assert "lbfgs, sparse, torchscript" in line_of_fsdp
