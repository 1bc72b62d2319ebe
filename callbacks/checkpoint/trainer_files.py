"""Files that a hosted trainer's own hook adds to a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from torch.distributed.tensor import DTensor

from .format.layout import TRAINER_FOLDER
from .storage.commit import Staging, stage
from .storage.write_file import naming_the_checkpoint

__all__ = ["WritesTrainerFiles", "join_in_trainer_files", "stage_trainer_files"]


@runtime_checkable
class WritesTrainerFiles(Protocol):
    """A LightningModule whose trainer has files of its own to add; asked on rank zero, inside the checkpoint."""

    def save_trainer_files(self, *, output_dir: Path, step: int, final: bool) -> Mapping[str, Any] | None:
        """Write into `output_dir`, which becomes ``trainer/`` of the checkpoint; the result goes into the record."""
        ...


def stage_trainer_files(
    pl_module: pl.LightningModule, path: Path, step: int, final: bool
) -> tuple[Staging | None, Mapping[str, Any] | None]:
    """Have the trainer of `pl_module` write its files for the checkpoint whose record will be `path`; on rank zero.

    Returns:
        The folder that holds them until the checkpoint is committed, and what the hook returned; None and None where
        the module has no such trainer.

    Raises:
        UnwrittenCheckpointError: The folder cannot be made.
    """
    if not isinstance(pl_module, WritesTrainerFiles):
        return None, None
    with naming_the_checkpoint(path):
        staging = stage(path)
    try:
        output = staging.folder(TRAINER_FOLDER)
        result = pl_module.save_trainer_files(output_dir=output, step=step, final=final)
    except BaseException:
        staging.discard()
        raise
    return staging, result


def join_in_trainer_files(pl_module: pl.LightningModule, step: int, final: bool) -> None:
    """On ranks other than zero, whose files do not count: what a trainer asks of sharded modules needs all ranks."""
    if isinstance(pl_module, WritesTrainerFiles) and any(isinstance(p, DTensor) for p in pl_module.parameters()):
        with tempfile.TemporaryDirectory() as scratch:
            pl_module.save_trainer_files(output_dir=Path(scratch), step=step, final=final)
