"""The configuration of a fit, saved beside what it trains: one file for each attempt, and no other file is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import yaml
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override

from ...callbacks.checkpoint.checkpoint import Checkpoint
from ...callbacks.hook.events import callbacks_of
from ..plumbing.redaction import without_secrets

__all__ = ["SaveAttemptConfig", "checkpoints_of"]


def checkpoints_of(trainer: pl.Trainer) -> Path | None:
    """Where the `Checkpoint` callback keeps them; None without one, or where this run writes none."""
    callback = next((c for c in callbacks_of(trainer) if isinstance(c, Checkpoint)), None)
    if callback is None or getattr(trainer, "fast_dev_run", False):
        return None
    return callback.dirpath or Path(trainer.default_root_dir) / "checkpoints"


class SaveAttemptConfig(SaveConfigCallback):
    """Writes ``config-<attempt>.yaml`` where the checkpoints are, without them to the logger's folder.

    Only a fit is an attempt; ``validate``, ``test`` and ``predict`` write none. Secrets are left out.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self.already_saved:
            return
        self.already_saved = True
        folder = checkpoints_of(trainer) or trainer.log_dir  # which is broadcast, so every rank asks for it
        if not trainer.is_global_zero or folder is None or "://" in str(folder):
            return
        text = yaml.safe_dump(without_secrets(yaml.safe_load(self.parser.dump(self.config))), sort_keys=False)
        os.makedirs(folder, exist_ok=True)
        for path in _names(Path(folder)):
            try:
                with open(path, "x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                continue
            return


def _names(folder: Path) -> Iterator[Path]:
    attempt = 0
    while True:
        attempt += 1
        yield folder / f"config-{attempt}.yaml"
