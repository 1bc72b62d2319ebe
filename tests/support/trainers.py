"""A Lightning trainer that writes and shows nothing but what a test asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """Arguments of a trainer with one process on the CPU; only callbacks make checkpoints."""
    import lightning.pytorch as pl

    saves = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
    return pl.Trainer(**{**QUIET, "enable_checkpointing": saves, **settings}, callbacks=list(callbacks))
