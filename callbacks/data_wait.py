"""How long training has waited for its data."""

from __future__ import annotations

import lightning.pytorch as pl

__all__ = ["data_wait_s"]


def data_wait_s(trainer: pl.Trainer) -> float | None:
    """Seconds that training has waited for data so far; None where the loader does not tell."""
    waited_s: float | None = getattr(trainer.train_dataloader, "wait_seconds", None)
    return waited_s
