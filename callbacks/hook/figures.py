"""Figures that hooks measure while training goes on, on their way into the record of metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl

from .events import Figures
from .listeners import listeners

__all__ = ["FIGURES_FIELD", "log_to_loggers", "publish_figures"]

FIGURES_FIELD = "figures"
"""For the ``writes`` of a hook that publishes figures, so that `LogMetrics` runs after it in the same step."""


def publish_figures(trainer: pl.Trainer, figures: Figures, *, waits: bool = False) -> None:
    """Have `figures` sent to every logger of the trainer, in one record with the other metrics of the step.

    Args:
        trainer: The trainer that trains.
        figures: What is sent. Where it is published again before that, it is sent once, and no longer waits.
        waits: Send them with the next metrics at the cadence of `LogMetrics`, and not at this step.
    """
    heard = listeners(trainer, "on_figures")
    if heard:
        step = trainer.global_step
        for hear in heard:
            hear(trainer, trainer.lightning_module, figures, step, waits)
    elif trainer.is_global_zero:
        log_to_loggers(trainer, figures(), trainer.global_step)


def log_to_loggers(trainer: pl.Trainer, metrics: Mapping[str, float], step: int) -> None:
    """Send metrics of `step` to every logger of the trainer, in a record of their own."""
    for logger in trainer.loggers if metrics else ():
        logger.log_metrics(metrics=dict(metrics), step=step)
