"""Training ends if the monitored value stops improving; a missing or nan monitor is an error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import MonitorError, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, EarlyStopping, Evaluate, LogMetrics
from support import SUPPORT
from support.forked import run_forked
from support.messages import refusal
from support.rank_processes import run_ranks
from support.trainer_class import Counts


class Falls(Counts):
    """Its loss falls by one each step, down to `floor`; its score is the loss."""

    def __init__(self, floor: float = 20.0, values: dict[int, float] | None = None) -> None:
        self.floor, self.values = floor, values or {}

    def loss(self, state) -> float:
        return self.values.get(state["steps"], max(self.floor, 100.0 - state["steps"]))

    def train_step(self, batch, state, ctx):
        super().train_step(batch, state, ctx)
        return StepResult(metrics={"loss": self.loss(state)})

    def evaluate(self, state, ctx):
        return {"val/loss": self.loss(state)}


def test_training_ends_after_some_steps_without_an_improvement(fit) -> None:
    trainer, module = fit(Falls(floor=90.0), [LogMetrics(5), EarlyStopping("loss", patience=20)], steps=100)

    assert trainer.global_step == 30  # the last improvement came with step 10
    assert module.stopped == "should_stop"


@pytest.mark.parametrize(
    ("floor", "callback", "last"),
    [
        (0.0, EarlyStopping("loss", 20, min_delta=1000.0), 25),
        (0.0, EarlyStopping("loss", 20, mode="max"), 25),
        (90.0, EarlyStopping("val/loss", 12), 24),  # the best score came with step 12
    ],
    ids=["min_delta", "mode", "a score"],
)
def test_the_step_at_which_training_ends(fit, floor, callback, last) -> None:
    trainer, _ = fit(Falls(floor=floor), [LogMetrics(5), Evaluate(4), callback], steps=100)

    assert trainer.global_step == last


def test_a_plain_module_with_its_own_logging_is_monitored(quiet) -> None:
    class Logs(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            self.log("quality", float(min(batch_idx, 15)))
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    stopping = EarlyStopping("quality", 20, mode="max")
    trainer = pl.Trainer(**quiet, max_epochs=1, callbacks=[stopping])
    trainer.fit(Logs(), torch.utils.data.DataLoader(torch.ones(200, 1)))

    assert stopping.best == 15.0
    assert trainer.global_step == stopping.best_step + 20


def test_a_resumed_run_continues_the_count(fit, tmp_path: Path) -> None:
    for steps, resumes in ((20, {}), (100, {"ckpt_path": tmp_path / "c" / "final.json"})):
        saver = Checkpoint(tmp_path / "c", replace_existing=True)
        callbacks = [LogMetrics(5), EarlyStopping("loss", 20), saver]
        trainer, _ = fit(Falls(floor=90.0), callbacks, steps=steps, enable_checkpointing=True, **resumes)

    assert trainer.global_step == 30


@pytest.mark.parametrize(
    ("values", "evaluates", "monitor"),
    [({}, False, "train/los"), ({}, True, "val/accuracy"), ({10: float("nan")}, False, "loss")],
    ids=["unknown metric", "unknown score", "nan"],
)
def test_a_monitor_that_is_missing_or_nan_is_an_error(fit, values, evaluates, monitor) -> None:
    callbacks = [LogMetrics(5), *([Evaluate(5)] if evaluates else []), EarlyStopping(monitor, 20)]
    with refusal(MonitorError):
        fit(Falls(values=values), callbacks, steps=50)


def test_all_invalid_arguments_are_named_at_once() -> None:
    with refusal(ValueError):
        EarlyStopping("loss", -1, min_delta=-0.5, mode="best")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/acc"}},
            "Early stopping conditioned on metric `val/acc` which is not available",
        ),
        (
            {"class_path": "genlight.callbacks.EarlyStopping", "init_args": {"monitor": "val/acc", "patience": 5}},
            "EarlyStopping(monitor='val/acc'): the metrics of step 1 do not have it",
        ),
    ],
)
def test_a_job_with_an_unknown_monitor_ends_without_a_traceback(tmp_path: Path, callback, message: str) -> None:
    """Lightning's own callback raises a `RuntimeError` at the end of the epoch."""
    spec = {
        **TrainingJobSpec("r", 5, metric_every=1).__dict__,
        "trainer": "support.trainer_class:Counts",
        "mock_batches": [1, 2, 3, 4, 5],
        "lightning": {"accelerator": "cpu", "callbacks": [callback]},
    }
    (tmp_path / "job.json").write_text(json.dumps({key: value for key, value in spec.items() if value not in ("", {})}))

    paths = os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
    done = run_forked("run", "job.json", folder=tmp_path, environ={**os.environ, "PYTHONPATH": paths})

    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = json.loads((tmp_path / "runs" / "r" / "metrics" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["category"]) == ("failed", "train-step")


@pytest.mark.slow
@pytest.mark.promise(name="ranks")
def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """Ranks agree every 10 steps: one callback stops at step 7, the other sees no better loss for 18 steps after 5."""
    run_ranks("should_stop_ranks.py", tmp_path)

    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"six hooks": 10, "early stopping": 30}] * 2
