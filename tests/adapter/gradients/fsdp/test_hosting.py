"""A job and a configuration of LightningCLI that shard by FSDP 2, from the command line to the resume."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from genlight.callbacks.checkpoint import load, newest_valid
from genlight.reporters import read_events
from support.forked import run_forked

pytestmark = [pytest.mark.promise(name="ranks"), pytest.mark.slow]

TRAINER = """
import torch
from genlight.adapter import StepResult

class Sharded:
    def setup(self, ctx): ...

    def configure(self, ctx):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor([list(raw[name]) for name in "ab"], dtype=torch.float32).T

    def train_step(self, batch, state, ctx):
        assert type(state["model"]).__name__ == "FSDPSequential"
        loss = state["model"](batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {name: state[name].state_dict() for name in ("model", "optimizer")}

    def load_state_dict(self, state, payload, ctx):
        for name in ("model", "optimizer"):
            state[name].load_state_dict(payload[name])
"""
STRATEGY = {"class_path": "genlight.adapter.FSDP2Strategy", "init_args": {"units": ["Linear"]}}
BATCHES = [{"a": [0.1, 0.2 * step, 0.3, 0.4], "b": [0.4, -0.3, 0.2, -0.1 * step]} for step in range(16)]
LIGHTNING = {"accelerator": "cpu", "devices": 2, "strategy": STRATEGY}


@pytest.fixture
def genlight(tmp_path):
    """Return a function that runs a command line in a folder with the trainer."""
    (tmp_path / "sharded_trainer.py").write_text(TRAINER)

    def run(*words):
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = run_forked(*words, folder=tmp_path, environ=environ)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_sharded_job_resumes_on_another_number_of_ranks(genlight, tmp_path):
    job = {
        "run_id": "sharded",
        "trainer": "sharded_trainer:Sharded",
        "max_steps": 2,
        "checkpoint_every": 2,
        "mock_batches": BATCHES,
        "lightning": LIGHTNING,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    longer = ("--set", "max_steps=4", "--set", "resume_from_latest=true")

    code, out = genlight("run", "job.json")
    assert code == 0, out
    code, out = genlight("run", "job.json", *longer, "--set", "lightning.devices=1")
    assert code == 0, out

    folder = tmp_path / "runs" / "sharded"
    events = list(read_events(folder / "metrics" / "events.jsonl"))
    assert [event["event"] for event in events if event["event"] in ("completed", "failed")] == ["completed"] * 2
    record, _ = newest_valid(folder / "checkpoints")
    assert record.step == 4
    payload = load(record.path)
    assert payload["global_step"] == 4


def test_a_configuration_of_lightningcli_shards_and_resumes(genlight, tmp_path):
    def configuration(steps):
        keeps = {"class_path": "genlight.callbacks.Checkpoint", "init_args": {"dirpath": "kept", "every_n_steps": 2}}
        trainer = {**LIGHTNING, "max_steps": steps, "logger": False, "enable_progress_bar": False, "callbacks": [keeps]}
        job = {"run_id": "sharded", "max_steps": steps}
        model = {
            "class_path": "genlight.adapter.ContractModule",
            "init_args": {"plugin": "sharded_trainer:Sharded", "job": job},
        }
        data = {
            "class_path": "genlight.adapter.ArrowDataModule",
            "init_args": {"parquet_paths": "x.parquet", "columns": ["a", "b"], "batch_size": 2},
        }
        (tmp_path / "fit.yaml").write_text(json.dumps({"model": model, "data": data, "trainer": trainer}))

    pq.write_table(pa.table({name: torch.arange(16).div(16).tolist() for name in "ab"}), tmp_path / "x.parquet")

    configuration(2)
    code, out = genlight("fit", "--config", "fit.yaml")
    assert code == 0, out
    configuration(4)
    code, out = genlight("fit", "--config", "fit.yaml", "--resume", "auto")
    assert code == 0, out

    assert newest_valid(tmp_path / "kept")[0].step == 4


def test_doctor_lists_requirements_and_limits_of_fsdp_2(genlight, tmp_path):
    job = {"run_id": "r", "trainer": "sharded_trainer:Sharded", "max_steps": 2, "mock_batches": BATCHES}
    (tmp_path / "job.json").write_text(json.dumps({**job, "lightning": LIGHTNING}))

    code, out = genlight("doctor", "job.json")

    assert code == 0, out
    line_of_fsdp = next(
        line for line in out.splitlines() if "FSDP 2 needs torch>=2.9, `unused_parameters` torch>=2.13" in line
    )
    assert "lbfgs, sparse, torchscript" in line_of_fsdp
