"""Ends training once a metric or score no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from ..adapter.contract.exceptions import MonitorError
from ..adapter.plumbing.text import nearest
from .health.recover import Recover
from .hook.cadence import NEVER, Boundaries
from .hook.events import callbacks_of
from .hook.hook import Hook, skippable

__all__ = ["EarlyStopping"]

log = logging.getLogger(__name__)

AGREE_EVERY = 10
"""How many steps apart ranks agree on a stop, and a module that logs by itself is read."""


class EarlyStopping(Hook):
    """Ends training as completed when a monitored value has not improved for `patience` steps.

    For a trainer class, `monitor` is a metric at its reporting cadence or a score of an evaluation. For any other
    module it is a logged value, checked every 10 steps and after each validation. Rank zero decides; all ranks stop
    after the same step, at most 10 steps later. The count continues when a run resumes.

    Args:
        monitor: Name of a metric or score as it is reported; ``loss`` finds ``train/loss``.
        patience: Steps without an improvement after which training ends; Lightning's own `EarlyStopping` counts
            validations instead.
        min_delta: By how much a value must be better than the best one to be an improvement.
        mode: Whether a smaller (``min``) or a larger (``max``) value is better.

    Raises:
        ValueError: An argument makes no sense; all that do are named.
        MonitorError: While training: no such metric or score has come, or its value is not finite.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"
    optional_reads = ("loss_stats", "eval_scores")

    def __init__(
        self,
        monitor: str = "train/loss",
        patience: int = 1000,
        *,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        wrong = [] if monitor else ["`monitor` '' (expected the name of a metric)"]
        if patience < 1:
            wrong.append(f"`patience` {patience} (expected a number of steps >= 1)")
        if not 0 <= min_delta < math.inf:
            wrong.append(f"`min_delta` {min_delta} (expected a number >= 0)")
        if mode not in ("min", "max"):
            wrong.append(f"`mode` {mode!r} (expected 'min' or 'max')")
        if wrong:
            raise ValueError(f"Invalid arguments of EarlyStopping: {', '.join(wrong)}.")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.best: float | None = None
        """The best value so far."""
        self.best_step = 0
        """The step that had it; before the first value, the one that the count began at."""
        self._wants_stop = False
        self._names: set[str] = set()
        self._votes = Boundaries(self, every=AGREE_EVERY)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._wants_stop = False
        self._names.clear()
        self._votes = Boundaries(self, trainer.global_step, every=AGREE_EVERY)
        if self.best is None:
            self.best_step = trainer.global_step

    @override
    def on_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Mapping[str, float], step: int
    ) -> None:
        self.judge(trainer, metrics, step)
        # Nothing but metrics will come where nothing evaluates.
        if self.best is None and not _evaluates(trainer):
            raise self._missing(f"the metrics of step {step} do not have it")

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        self.judge(trainer, scores, step)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and not hasattr(pl_module, "step_result"):
            self.judge(trainer, _numbers(trainer), trainer.global_step)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        logs_by_itself = not hasattr(pl_module, "step_result")
        if not logs_by_itself and trainer.world_size == 1:
            self.next_due_step = NEVER
        elif self._votes.crosses(trainer.global_step):
            if logs_by_itself:
                self.judge(trainer, _numbers(trainer), trainer.global_step)
            if trainer.world_size > 1 and trainer.strategy.reduce_boolean_decision(self._wants_stop, all=False):
                trainer.should_stop = True

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._wants_stop = False

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.best is None and trainer.is_global_zero:
            log.warning("%s", self._missing("training ended without it"))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]

    def judge(self, trainer: pl.Trainer, values: Mapping[str, float], step: int) -> None:
        """Look whether the monitored one of `values` has improved at `step`; end training where it no longer does.

        Raises:
            MonitorError: It has not come within the whole `patience`, or is not finite.
        """
        if self._wants_stop or not trainer.is_global_zero:
            return
        self._names.update(values)
        value = values.get(self.monitor, values.get(f"train/{self.monitor}"))
        if value is None:
            if self.best is None and step - self.best_step >= self.patience:
                raise self._missing(
                    f"it was not reported within {self.patience} steps, the whole `patience`, which counts steps and "
                    "not validations"
                )
            return
        if not math.isfinite(value):
            if any(isinstance(callback, Recover) for callback in callbacks_of(trainer)):
                return  # it decides what becomes of such a step
            raise MonitorError(
                f"EarlyStopping(monitor={self.monitor!r}): its value at step {step} is {value}. Resume from an earlier "
                "checkpoint after the cause is mended; `WatchNonfinite` and `Diagnosis` help to find it"
            )
        is_better = self.best is None or (
            value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta
        )
        if is_better:
            self.best, self.best_step = value, step
        elif step - self.best_step >= self.patience:
            self._wants_stop = True
            log.info(
                "%s has not improved on %.6g of step %d for %d steps: training ends",
                *(self.monitor, self.best, self.best_step, step - self.best_step),
            )
            if trainer.world_size == 1:
                trainer.should_stop = True

    def _missing(self, how: str) -> MonitorError:
        known = f"; there are {', '.join(sorted(self._names))}" if self._names else ""
        return MonitorError(
            f"EarlyStopping(monitor={self.monitor!r}): {how}{known}.{nearest(self.monitor, self._names)}"
        )


def _evaluates(trainer: pl.Trainer) -> bool:
    """Whether a score may come that no training step has."""
    writes = (name for callback in callbacks_of(trainer) for name in getattr(callback, "writes", ()))
    return "eval_scores" in writes or bool(trainer.enable_validation)


def _numbers(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
