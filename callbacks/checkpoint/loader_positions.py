"""Loaders that cannot go on where a run within an epoch was left."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader

__all__ = ["warn_of_loaders_without_position"]

log = logging.getLogger(__name__)


def warn_of_loaders_without_position(trainer: pl.Trainer) -> None:
    """Name the training loaders that have no state, so that they begin with their first batch again.

    One whose ``begins_anew`` is true does so on purpose; its ``told_on_resume``, where it has that, says what is lost.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:  # a list of batches is one loader
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if getattr(loader, "begins_anew", False):
            told = getattr(loader, "told_on_resume", None)
            if told is not None:
                log.warning("%s", told)
        elif not is_stateful:
            log.warning(
                "The run goes on within an epoch, but its %s keeps no position: it begins with its first batch again. "
                "Give it `state_dict` and `load_state_dict`, as the loader of ArrowDataModule has, or save between "
                "epochs.",
                type(loader).__name__,
            )
