"""What the module of a hosted trainer tells callbacks, loggers and the loop: steps, metrics, and why it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from typing_extensions import override

from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.lightning_internals import set_callback_metrics
from ..contract.types import StepContext, TrainingJobSpec
from ..loop.fit_loop import own_epoch_loop
from .step_metrics import values_on_device

__all__ = ["ReportingModule"]

log = logging.getLogger(__name__)


class ReportingModule(pl.LightningModule):
    """The part of `ContractModule` that callbacks, loggers and the loop read.

    Args:
        ctx: The context of the trainer; its ``is_canceled`` is the caller's own check.
    """

    job: TrainingJobSpec | None = None

    def __init__(self, ctx: StepContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.step_result: Any = None
        """What the last ``train_step`` returned."""
        self.published: dict[str, float] = {}
        """What was last sent to loggers, by name."""
        self.ended = False
        self._restored_step = 0
        self._cancel_checks: list[Callable[[], bool]] = [] if ctx.is_canceled is None else [ctx.is_canceled]

    @property
    def given_job(self) -> TrainingJobSpec:
        """The job, without what the Lightning trainer knows of it."""
        return self.job or self.ctx.job

    @property
    @override
    def hparams_initial(self) -> AttributeDict:
        """What loggers are told: the job's hyperparameters, and those that a subclass has saved."""
        return AttributeDict({**self.given_job.hyperparams, **super().hparams_initial})

    @property
    def completed_steps(self) -> int:
        """Steps trained so far, those before a resume included."""
        loop = own_epoch_loop(self)
        return 0 if loop is None else loop.completed_steps

    @property
    def restored_step(self) -> int:
        """Steps behind what this module holds now: those trained here, else those of the checkpoint it was given."""
        return self.completed_steps or self._restored_step

    @property
    def failed_step(self) -> int:
        """The step to name in a failure: the one that was being executed, else the completed steps."""
        loop = own_epoch_loop(self)
        return 0 if loop is None else loop.step_in_progress or loop.completed_steps

    @property
    def stopped(self) -> str | None:
        """Why training ended before its step limit: ``should_stop``, ``data_exhausted``, or None."""
        if not self.ended or self.completed_steps >= self.ctx.job.max_steps:
            return None
        return "should_stop" if self.trainer.should_stop else "data_exhausted"

    def metrics_on_device(self) -> dict[str, torch.Tensor]:
        """What was last sent to loggers, with the last step's metrics in place of older ones; waits for no device.

        Metrics that are neither tensors nor plain numbers come at a cadence alone, where `metrics` reads them.
        """
        return values_on_device(self.step_result, self.published)

    def feed_callback_metrics(self) -> None:
        """Leave the last metrics where Lightning's monitors and progress bars find them outside of training steps."""
        set_callback_metrics(self.trainer, self.metrics_on_device(), self.published)

    def is_canceled(self) -> bool:
        """Whether a stop was asked for; what ``ctx.is_canceled`` answers."""
        return run_state_of(self.trainer).stop_reason is not None or any(check() for check in self._cancel_checks)

    def add_cancel_check(self, check: Callable[[], bool]) -> None:
        """Have `is_canceled` ask `check` too; a stop callback adds what it watches."""
        self._cancel_checks.append(check)

    def restore_rng(self) -> None:
        """Continue the random numbers of the checkpoint: before the first batch is fetched, which may draw some."""
        for callback in callbacks_of(self.trainer):
            restore = getattr(callback, "restore_pending_rng", None)
            if restore is not None:
                restore(self.trainer)

    def training_ended(self) -> None:
        """The loop has ended as planned."""
        self.ended = True
        if self.stopped == "data_exhausted" and self.trainer.max_epochs != 0:
            log.warning(
                "the source of batches ended at step %d of %d; the run completes there",
                self.completed_steps,
                self.ctx.job.max_steps,
            )
