"""The last lines of ``genlight fit``."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl

from ...callbacks.checkpoint.format.layout import FINAL_NAME
from ...callbacks.hook.events import callbacks_of
from ...callbacks.write_samples import WriteSamples
from ...reporters.events.event_logger import EventLogger
from ..run.results import newest_picture, show_results
from .fit_config import checkpoints_of

__all__ = ["show_fit_results"]


def show_fit_results(trainer: pl.Trainer, model: pl.LightningModule, resumed_step: int | None) -> None:
    """Say how a fit ended, and where its results are.

    Args:
        trainer: The trainer whose fit has ended.
        model: What it trained.
        resumed_step: The step of the checkpoint that it went on from; None where it began anew.
    """
    if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
        return
    directory = checkpoints_of(trainer)
    places: dict[str, Path | None] = {
        "final checkpoint": None if directory is None else directory / f"{FINAL_NAME}.json",
        "checkpoints": directory,
    }
    samples = (c.directory for c in callbacks_of(trainer) if isinstance(c, WriteSamples))
    places["samples"] = next(samples, None)
    for logger in trainer.loggers:
        if isinstance(logger, EventLogger):
            places["events"] = logger.path
        elif logger.log_dir is not None:
            places[logger.name or type(logger).__name__] = Path(logger.log_dir)
    if places["samples"] is not None:
        places["a picture to open"] = newest_picture(places["samples"])
    steps = getattr(model, "completed_steps", trainer.global_step)
    stopped = getattr(model, "stopped", None)
    ended = f"fit completed at step {steps}" + (f" ({stopped})" if stopped else "")
    if steps == resumed_step:
        ended = f"the fit had completed at step {steps} before; there was nothing to train"
    show_results(ended, places)
