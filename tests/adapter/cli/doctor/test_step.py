"""``genlight doctor --step`` takes one real step, and names what is wrong with the batch, the gradients or the line."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter.cli import main
from support.jobs import write_job

TRAINER = """
import torch

from genlight.adapter import StepResult
from support.trainer_class import Trains


class Fits(Trains):
    def model(self):
        return torch.nn.Linear(1, 1)
    def prepare_batch(self, raw_batch, state, ctx):
        return torch.tensor(raw_batch.column("x").to_pylist(), dtype=torch.float32)[:, None]


class TakesText(Fits):
    def prepare_batch(self, raw_batch, state, ctx):
        return torch.tensor(raw_batch.column("text").to_pylist())  # here


class Forgets(Fits):
    def train_step(self, batch, state, ctx):
        return StepResult(metrics={"loss": state["model"](batch).sum().detach() * float("nan")})
"""


HERE = TRAINER[: TRAINER.index("# here")].count("\n") + 1


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("Fits", 0, ["text string, x int64", "'text' (1 of 3)", "2 weights have gradients", "train/loss"]),
        ("TakesText", 2, ["text in column 'text'", f"(stepped_takestext.py:{HERE}: return torch.tensor("]),
        ("Forgets", 0, ["2 of 2 weights have no gradient and no change", "train/loss nan"]),
    ],
)
def test_one_step_is_taken_and_leaves_nothing(name, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = f"stepped_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(TRAINER)
    pq.write_table(pa.table({"text": ["a", "b", None], "x": [1, 2, 3]}), "rows.parquet")
    write_job(
        tmp_path,
        trainer=f"{module}:{name}",
        mock_batches=...,
        dataset={"parquet_paths": ["rows.parquet"], "batch_size": 3},
    )

    assert main(["doctor", "job.json", "--step"]) == code
    out = capsys.readouterr().out
    assert all(words in out for words in told), out
    assert not (tmp_path / "runs").exists()
