"""Runs of W&B and MLflow that a resumed fit goes on with."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from ...callbacks.tracking.continue_runs import continue_runs
from ...reporters.events.event_logger import EventLogger
from ..module.module import ContractModule
from .fit_config import checkpoints_of

__all__ = ["continue_tracking"]


def continue_tracking(
    trainer: pl.Trainer, model: pl.LightningModule, resumed_step: int | None, *, resume: str | None
) -> None:
    """Have the loggers of a fit that goes on keep their runs; which those are is kept beside the checkpoints.

    Args:
        trainer: The trainer that is about to fit `model`. Without a `Checkpoint` callback nothing is kept.
        model: Lightning's own loop reports the step after `resumed_step` under this number, a trainer class's the
            step before.
        resumed_step: Completed steps of the checkpoint from which training goes on; None where it begins.
        resume: As given to the command; with ``auto`` a fit that begins again keeps the runs as well.
    """
    directory = checkpoints_of(trainer)
    if directory is None or not trainer.is_global_zero:
        return
    os.makedirs(directory, exist_ok=True)
    event_log = next((logger.path for logger in trainer.loggers if isinstance(logger, EventLogger)), None)
    if resumed_step is None and resume == "auto":
        resumed_step = 0
    if resumed_step is not None and not isinstance(model, ContractModule):
        resumed_step -= 1
    continue_runs(trainer, directory, resumed_step=resumed_step, events_path=event_log)
