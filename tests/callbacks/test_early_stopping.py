"""Training ends if the monitored value stops improving; a missing or nan monitor is an error."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import ContractModule, MonitorError, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Checkpoint, EarlyStopping, Evaluate, LogMetrics
from genlight.callbacks.compat import Callback, CallbackList
from support.messages import refusal
from support.plain_module import Fits
from support.rank import Rank
from support.rank_processes import on_ranks
from support.trainer_class import Counts


class Falls(Counts):
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
    class Logs(Fits):
        def training_step(self, batch, batch_idx):
            self.log("quality", float(min(batch_idx, 15)))
            return super().training_step(batch, batch_idx)

    stopping = EarlyStopping("quality", 20, mode="max")
    trainer = pl.Trainer(**quiet, max_epochs=1, callbacks=[stopping])
    trainer.fit(Logs(), torch.utils.data.DataLoader(torch.ones(200, 2)))

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


class Improves(Counts):
    """Its loss falls for longer on rank 1, but rank 1 does not decide."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        super().train_step(batch, state, ctx)
        return StepResult(metrics={"loss": 100.0 - min(state["steps"], 5 if self.rank == 0 else 50)})


class Stops(Callback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.should_stop = trainer.global_step >= 7


def stop_on_rank(rank: Rank) -> dict[str, int]:
    steps = {}
    early_stopping = [LogMetrics(1), EarlyStopping("loss", 18)]
    for name, callbacks in {"six hooks": [CallbackList([Stops()], defaults=False)], "early": early_stopping}.items():
        trainer = rank.trainer(*callbacks, max_steps=60, max_epochs=1)
        with rank.group(f"store {name}"):
            trainer.fit(ContractModule(Improves(rank.number)), BatchStream(range(60)))
        steps[name] = trainer.global_step
    return steps


@pytest.mark.slow
@pytest.mark.promise(name="ranks")
def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """Ranks agree every 10 steps: one callback stops at step 7, the other sees no better loss for 18 steps after 5."""
    found, _ = on_ranks(stop_on_rank, tmp_path)

    assert found == [{"six hooks": 10, "early": 30}] * 2
