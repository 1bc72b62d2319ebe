"""``genlight doctor --step`` takes one real step, and names what is wrong with the batch, the gradients or the line."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter.cli import main

TRAINER = """
import torch

from genlight.adapter import StepResult


class Fits:
    def setup(self, ctx): pass
    def configure(self, ctx):
        model = torch.nn.Linear(1, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    def prepare_batch(self, raw_batch, state, ctx):
        return torch.tensor(raw_batch.column("x").to_pylist(), dtype=torch.float32)[:, None]
    def train_step(self, batch, state, ctx):
        loss = state["model"](batch).square().mean()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): pass


class TakesText(Fits):
    def prepare_batch(self, raw_batch, state, ctx):
        return torch.tensor(raw_batch.column("text").to_pylist())  # here


class Forgets(Fits):
    def train_step(self, batch, state, ctx):
        return StepResult(metrics={"loss": state["model"](batch).sum().detach() * float("nan")})
"""


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("Fits", 0, ["text string, x int64", "'text' (1 of 3)", "2 weights have gradients", "train/loss"]),
        ("TakesText", 2, ["text in column 'text'", "(stepped_takestext.py:25: return torch.tensor("]),
        ("Forgets", 0, ["2 of 2 weights have no gradient and no change", "train/loss nan"]),
    ],
)
def test_one_step_is_taken_and_leaves_nothing(name, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = f"stepped_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(TRAINER)
    pq.write_table(pa.table({"text": ["a", "b", None], "x": [1, 2, 3]}), "rows.parquet")
    job = {"run_id": "r", "trainer": f"{module}:{name}", "max_steps": 2, "lightning": {"accelerator": "cpu"}}
    job["dataset"] = {"parquet_paths": ["rows.parquet"], "batch_size": 3}
    (tmp_path / "job.json").write_text(json.dumps(job))

    assert main(["doctor", "job.json", "--step"]) == code
    out = capsys.readouterr().out
    assert all(words in out for words in told), out
    assert not (tmp_path / "runs").exists()
