"""Lightning's checkpoint plugin: whole, durable checkpoints without pickle for whatever Lightning saves and loads."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from typing_extensions import override

from .format.layout import local_path
from .loading import MapLocation
from .store import CheckpointStore

__all__ = ["DurableCheckpointIO", "give_back_plugin", "install_plugin"]

log = logging.getLogger(__name__)


class DurableCheckpointIO(CheckpointIO):
    """Writes each checkpoint completely or not at all, verifies it on loading, and stores no pickle.

    ``Trainer(plugins=[DurableCheckpointIO()])`` works for any LightningModule; ``ModelCheckpoint`` and ``ckpt_path``
    behave as with Lightning's own plugin, on local file systems. The checkpoint ``P.ckpt`` consists of a record file
    ``P.ckpt`` and a folder ``P/`` next to it (``P~1/`` if that name is taken). ``.ckpt`` files of stock Lightning can
    be loaded too, always with ``weights_only=True``, whatever the caller asks for, so that loading never executes code.

    Where Lightning opens a file itself, as in ``load_from_checkpoint`` or in a Trainer without this plugin, it knows
    files of torch alone: ``genlight checkpoints export PATH --to FILE.ckpt`` makes one.

    Args:
        asynchronous: Copy the tensors and write in the background. The next save waits for the one in flight; a failed
            save is raised by the next call.
    """

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.store = CheckpointStore()

    def __getstate__(self) -> dict[str, Any]:
        # What is in flight, or listened for, belongs to the process that began it.
        return {**vars(self), "store": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "store": CheckpointStore()})

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint`; durable when this returns, unless it is asynchronous.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it.
            UnwrittenCheckpointError: It could not be written; the checkpoint that was there before still is.
            TypeError: `storage_options` is given.
            ValueError: `path` is a URL.
        """
        if storage_options is not None:
            raise TypeError(
                f"Invalid `storage_options`. {type(self).__name__} writes to a local file system and takes none, "
                f"but received {storage_options!r}."
            )
        self.store.save(local_path(path, "path"), checkpoint, asynchronous=self.asynchronous)

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint at `path`, proven before any of it is used.

        Raises:
            BrokenCheckpointError: It differs from what was saved.
            FileNotFoundError: There is none.
            ValueError: `path` is a URL.
        """
        return self.store.load(local_path(path, "path"), map_location)

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path`, after the save in flight has become durable.

        A file or folder there that is not a checkpoint stays, with a warning.
        """
        self.store.remove(local_path(path, "path"))

    @override
    def teardown(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exception: That save failed. Logged instead while another exception ends the run, which is the root cause.
        """
        is_failing = sys.exc_info()[1] is not None
        try:
            self.store.close()
        except Exception:
            if not is_failing:
                raise
            log.exception("The checkpoint in flight could not be written")


def install_plugin(trainer: pl.Trainer) -> tuple[bool, DurableCheckpointIO]:
    """The `DurableCheckpointIO` of `trainer`, which replaces Lightning's own default but no other plugin.

    Returns:
        Whether it was installed now, and the plugin.

    Raises:
        TypeError: The trainer was given another checkpoint plugin.
    """
    plugin = trainer.strategy.checkpoint_io
    if isinstance(plugin, DurableCheckpointIO):
        return False, plugin
    if type(plugin) is not TorchCheckpointIO:
        raise TypeError(
            f"Invalid `plugins`. Checkpoint writes through DurableCheckpointIO, but the trainer was given "
            f"{type(plugin).__name__}; leave that plugin out."
        )
    installed = DurableCheckpointIO()
    trainer.strategy.checkpoint_io = installed
    return True, installed


def give_back_plugin(trainer: pl.Trainer) -> None:
    """Undo `install_plugin` where a process hands its weights to the one that started it, which knows no other."""
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        trainer.strategy.checkpoint_io = TorchCheckpointIO()
