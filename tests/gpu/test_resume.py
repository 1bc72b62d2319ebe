"""A job on a CUDA device that is killed and started again ends with the bits of an uninterrupted one.

CI has no such device and skips it: ``pytest tests/gpu -m gpu``.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from genlight.adapter.check.snapshot import flatten
from genlight.callbacks.checkpoint import load, verify

pytestmark = [
    pytest.mark.promise(name="resume"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 400
LIMIT_S = 120

TRAINER = '''
import torch
from gen_worker.trainer import StepResult


class Trainer:
    """Has dropout on the device, an average of the weights, a scheduler, a generator, and windows of two steps."""

    def setup(self, ctx): ...

    def configure(self, ctx):
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        model = torch.nn.Sequential(*layers).to(ctx.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9),
            "average": [p.detach().clone() for p in model.parameters()],
            "noise": torch.Generator(ctx.device).manual_seed(1),
            "steps": 0,
        }

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw["x"].to_pylist(), device=ctx.device)

    def train_step(self, batch, state, ctx):
        assert batch.is_cuda
        noise = torch.randn(batch.shape, generator=state["noise"], device=batch.device)
        loss = (state["model"](batch + 0.1 * noise).float() - batch.sum(1, keepdim=True)).square().mean()
        (loss / 2).backward()
        state["steps"] += 1
        if state["steps"] % 2 == 0:
            torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["schedule"].step()
            with torch.no_grad():
                for mean, weight in zip(state["average"], state["model"].parameters()):
                    mean.lerp_(weight, 0.1)
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        return {"steps": state["steps"], "average": state["average"], "noise": state["noise"].get_state()}

    def load_state_dict(self, state, payload, ctx):
        state["steps"] = payload["steps"]
        for mean, saved in zip(state["average"], payload["average"]):
            mean.copy_(saved)
        state["noise"].set_state(payload["noise"].cpu())
'''


def start(folder: Path, run_id: str, precision: str) -> subprocess.Popen[bytes]:
    """Start the job in its own folder; the same command resumes it."""
    spec = {
        "run_id": run_id,
        "trainer": "resumed_trainer:Trainer",
        "max_steps": STEPS,
        "seed": 3,
        "metric_every": 1,
        "checkpoints": {"every_n_steps": 7, "keep_last": 3},
        "dataset": {"parquet_paths": ["rows.parquet"], "batch_size": 16, "shuffle": True, "seed": 5},
        "resume_from_latest": True,
        "lightning": {"accelerator": "gpu", "devices": 1, "precision": precision},
    }
    path = folder / f"{run_id}.json"
    path.write_text(json.dumps(spec))
    log = (folder / f"{run_id}.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "genlight", "run", str(path)], stdout=log, stderr=log, env=dict(os.environ)
    )


def steps_in(log: Path) -> int:
    return log.read_text().count('"train/loss"') if log.exists() else 0


def state_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state from which training continues, without clocks and the number of attempts."""
    own = checkpoint["genlight"]
    names = "state_dict", "optimizer_states", "lr_schedulers", "loops", "ArrowDataModule"
    return {
        **{name: checkpoint[name] for name in names},
        **{name: own[name] for name in ("rng", "generators", "unmanaged")},
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_killed_job_resumes_to_the_bits_of_an_uninterrupted_one(tmp_path, precision):
    (tmp_path / "resumed_trainer.py").write_text(TRAINER)
    rows = torch.rand(300, 8, generator=torch.Generator().manual_seed(0)).tolist()
    pq.write_table(pa.table({"x": rows}), tmp_path / "rows.parquet", row_group_size=50)
    uninterrupted = start(tmp_path, "uninterrupted", precision)

    log = tmp_path / "runs" / "killed" / "metrics" / "events.jsonl"
    for reached in (STEPS // 4, STEPS // 2):
        job = start(tmp_path, "killed", precision)
        until = time.monotonic() + LIMIT_S
        while steps_in(log) < reached and job.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        assert job.poll() is None, (tmp_path / "killed.log").read_text()
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    last = start(tmp_path, "killed", precision)

    for job, name in ((uninterrupted, "uninterrupted"), (last, "killed")):
        assert job.wait(LIMIT_S) == 0, (tmp_path / f"{name}.log").read_text()
    one, other = (tmp_path / "runs" / name / "checkpoints" / "final.json" for name in ("uninterrupted", "killed"))
    verify(one)
    verify(other)
    ended = (flatten(state_of(load(record)), "checkpoint") for record in (one, other))
    assert next(ended).differences(next(ended)) == []
