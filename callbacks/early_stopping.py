"""End training once a metric or score no longer improves. `StopVote` lets any rank end training on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from ..adapter.contract.exceptions import MonitorError
from ..adapter.plumbing.text import nearest, require
from .health.recover import Recover
from .hook.cadence import Boundaries, crossed
from .hook.events import callbacks_of, hosted_by, is_number, step_metrics
from .hook.hook import Hook, skippable

log = logging.getLogger(__name__)

AGREE_EVERY = 10
"""Number of steps between two agreements of the ranks on a stop."""


class StopVote:
    """A stop that any rank may request; all ranks stop after the same step, at most `AGREE_EVERY` steps later.

    Args:
        hook: The hook that owns this vote; `is_due` sets its ``next_due_step``.
        step: The step that was completed last.
    """

    def __init__(self, hook: Any, step: int = 0) -> None:
        self.is_requested = False
        self._due = Boundaries(hook, step, every=AGREE_EVERY)

    def request(self, trainer: pl.Trainer, stop: bool = True) -> None:
        """Stop after this step or, with several ranks, after their next agreement. `stop=False` withdraws a request."""
        self.is_requested = stop
        if trainer.world_size == 1:
            trainer.should_stop = stop

    def is_due(self, trainer: pl.Trainer) -> bool:
        """Whether `AGREE_EVERY` steps have passed; all ranks must call this after each step."""
        return self._due.crosses(trainer.global_step)

    def agree(self, trainer: pl.Trainer) -> None:
        """Stop if any rank wants to. Collective."""
        if trainer.world_size > 1 and trainer.strategy.reduce_boolean_decision(self.is_requested, all=False):
            trainer.should_stop = True

    def rewind(self, step: int) -> None:
        """Reset the vote after the run was rolled back to `step`."""
        self.is_requested = False
        self._due.rewind(step)


class EarlyStopping(Hook):
    """Ends training as completed when a monitored value has not improved for `patience` steps.

    For a trainer class, `monitor` is a metric at its reporting cadence or a score of an evaluation. For any other
    module it is a logged value, or one that ``training_step`` returns, checked every `check_every` steps and after each
    validation. Rank zero decides; all ranks stop after the same step, at most 10 steps later. The count continues when
    a run resumes.

    Args:
        monitor: Name of a metric or score as it is reported; ``loss`` finds ``train/loss``.
        patience: Steps without an improvement after which training ends; Lightning's own `EarlyStopping` counts
            validations instead.
        min_delta: By how much a value must be better than the best one to be an improvement.
        mode: Whether a smaller (``min``) or a larger (``max``) value is better.
        check_every: Steps between two checks of a module that hosts no trainer class; each waits for the device.

    Raises:
        ValueError: An argument is invalid; the message lists every invalid argument.
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
        check_every: int = 10,
    ) -> None:
        require(
            (patience >= 1, "patience", "a number of steps >= 1", patience),
            (0 <= min_delta < math.inf, "min_delta", "a number >= 0", min_delta),
            (mode in ("min", "max"), "mode", "'min' or 'max'", mode),
            (check_every >= 1, "check_every", "a number of steps >= 1", check_every),
        )
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.check_every = check_every
        self.best: float | None = None
        """The best value so far."""
        self.best_step = 0
        """The step of the best value; before the first value, the step at which the count began."""
        self._names: set[str] = set()
        self._vote = StopVote(self)
        self._checked = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._names = set()
        self._vote = StopVote(self, trainer.global_step)
        self._checked = trainer.global_step
        if self.best is None:
            self.best_step = trainer.global_step

    @override
    def on_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Mapping[str, float], step: int
    ) -> None:
        self.judge(trainer, metrics, step)
        # If something evaluates, the monitored name may be a score that comes later.
        if self.best is None and not _has_evaluation(trainer):
            raise self._missing_value(f"the metrics of step {step} do not have it")

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        self.judge(trainer, scores, step)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and hosted_by(pl_module) is None:
            self.judge(trainer, step_metrics(trainer, pl_module), trainer.global_step)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._checked = self._checked, trainer.global_step
        is_due = trainer.is_global_zero and crossed(before, self._checked, self.check_every)
        if is_due and hosted_by(pl_module) is None:
            returned = outputs if isinstance(outputs, Mapping) else {}
            values = {name: float(value) for name, value in returned.items() if is_number(value)}
            self.judge(trainer, values | step_metrics(trainer, pl_module), self._checked)
        if self._vote.is_due(trainer):
            self._vote.agree(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.best is None and trainer.is_global_zero:
            log.warning("%s", self._missing_value("training ended without it"))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]

    def judge(self, trainer: pl.Trainer, values: Mapping[str, float], step: int) -> None:
        """Check whether the monitored one of `values` has improved at `step`; end training if it no longer does.

        Raises:
            MonitorError: It was not reported within `patience` steps, or is not finite.
        """
        if self._vote.is_requested or not trainer.is_global_zero:
            return
        self._names.update(values)
        value = values.get(self.monitor, values.get(f"train/{self.monitor}"))
        if value is None:
            if self.best is None and step - self.best_step >= self.patience:
                raise self._missing_value(
                    f"it was not reported within {self.patience} steps (`patience` counts steps, not validations)"
                )
            return
        if not math.isfinite(value):
            if any(isinstance(callback, Recover) for callback in callbacks_of(trainer)):
                return  # `Recover` decides about such a step
            raise MonitorError(
                f"EarlyStopping(monitor={self.monitor!r}): its value at step {step} is {value}. Resume from an earlier "
                "checkpoint after the cause is fixed; `WatchNonfinite` and `Diagnosis` help to find it"
            )
        is_better = self.best is None or (
            value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta
        )
        if is_better:
            self.best, self.best_step = value, step
        elif step - self.best_step >= self.patience:
            self._vote.request(trainer)
            log.info(
                "%s has not improved on %.6g of step %d for %d steps: training ends",
                *(self.monitor, self.best, self.best_step, step - self.best_step),
            )

    def _missing_value(self, how: str) -> MonitorError:
        known = f"; the reported names are {', '.join(sorted(self._names))}" if self._names else ""
        return MonitorError(
            f"EarlyStopping(monitor={self.monitor!r}): {how}{known}.{nearest(self.monitor, self._names)}"
        )


def _has_evaluation(trainer: pl.Trainer) -> bool:
    """Whether scores may still come from an evaluation or a validation."""
    writes = (name for callback in callbacks_of(trainer) for name in getattr(callback, "writes", ()))
    return "eval_scores" in writes or bool(trainer.enable_validation)
