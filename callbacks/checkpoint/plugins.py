"""Integration with Lightning: a checkpoint plugin, and a strategy that saves sharded tensors through it.

The plugin writes complete, durable checkpoints without pickle. A stock `ModelParallelStrategy` bypasses the plugin and
writes a format that depends on the way of sharding. Here it saves and restores through the plugin: every rank writes
the slices that it holds, and reads the slices that it needs, whatever the number of ranks that saved them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from ..hook.events import callbacks_of
from ..lightning_internals import trains_in_copies
from ..optimizer_state import parameters_of
from ..rank_channel import RankGroups
from .capture import CONTRACT_KEY
from .format.record import local_path
from .listing import is_record
from .sharded.optimizer_placements import complete_state, place_state, with_placements
from .sharded.slices import keep_sharded, sharded_like
from .store import CheckpointStore, wait_after_failure


class DurableCheckpointIO(CheckpointIO):
    """Writes each checkpoint completely or not at all, verifies it on loading, and stores no pickle.

    ``Trainer(plugins=[DurableCheckpointIO()])`` works for any LightningModule; ``ModelCheckpoint`` and ``ckpt_path``
    behave as with Lightning's own plugin, on local file systems. The checkpoint ``P.ckpt`` consists of a record file
    ``P.ckpt`` and a folder ``P/`` next to it (``P~1/`` if that name is taken). ``.ckpt`` files of stock Lightning can
    be loaded too, always with ``weights_only=True``, even if the caller asks otherwise: loading never executes code.

    If Lightning opens a file itself, as in ``load_from_checkpoint`` or in a Trainer without this plugin, it can read
    only files of torch: ``genlight checkpoints export PATH --to FILE.ckpt`` makes one.

    Args:
        asynchronous: Copy the tensors and write in the background. The next save waits for the one in flight; the next
            call raises the error of a failed save.
    """

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.store = CheckpointStore()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint`; durable when this returns, unless the plugin is asynchronous.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it.
            UnwrittenCheckpointError: It could not be written; the previous checkpoint is unchanged.
            TypeError: `storage_options` is not None.
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
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at `path`, proven before any of it is used; its tensors are on the host.

        Raises:
            BrokenCheckpointError: A file differs from its record.
            FileNotFoundError: There is no checkpoint.
            TypeError: `map_location` is not the host.
            ValueError: `path` is a URL.
        """
        if map_location is not None and str(map_location) != "cpu":
            raise TypeError(
                f"Invalid `map_location`. {type(self).__name__} loads tensors to the host, but received "
                f"{map_location!r}; move them after loading."
            )
        return self.store.load(local_path(path, "path"))

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path`, after the save in flight is durable.

        A file or folder there that is not a checkpoint stays, with a warning.
        """
        self.store.remove(local_path(path, "path"))

    @override
    def teardown(self) -> None:
        """Wait for the save in flight.

        Raises:
            Exception: The save failed. If another exception already ends the run, the failed save is only logged.
        """
        if sys.exc_info()[1] is None:
            self.store.close()
        else:
            wait_after_failure(self.store.close)


class ImpliedCheckpointIO(DurableCheckpointIO):
    """The plugin of a Trainer whose user asked only for the `Checkpoint` callback, not for a plugin.

    It loads the checkpoints of that callback. Other files, such as those from ``ModelCheckpoint`` and
    ``trainer.save_checkpoint``, are written and removed as Lightning does without genlight, so that
    ``load_from_checkpoint`` and other programs can read them. They lack the state that only genlight restores.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        stock = {name: value for name, value in checkpoint.items() if name != CONTRACT_KEY}
        TorchCheckpointIO().save_checkpoint(stock, os.fspath(path), storage_options)

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if "://" in os.fspath(path):
            return TorchCheckpointIO().load_checkpoint(os.fspath(path))
        return super().load_checkpoint(path, map_location, weights_only)

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if is_record(path):
            super().remove_checkpoint(path)
        else:
            TorchCheckpointIO().remove_checkpoint(os.fspath(path))


def install_plugin(strategy: Strategy, *, for_others: bool = True) -> DurableCheckpointIO:
    """Return the `DurableCheckpointIO` of `strategy`; it replaces Lightning's own default but no other plugin.

    From now on a `ModelParallelStrategy` uses it, as other strategies do anyway.

    Args:
        strategy: The strategy of a Trainer.
        for_others: Whether files of other callbacks are written in genlight's format as well, if the user installed no
            plugin. Always so with a `ModelParallelStrategy`.

    Raises:
        TypeError: The trainer has another checkpoint plugin.
    """
    plugin = strategy.checkpoint_io
    if not isinstance(plugin, DurableCheckpointIO):
        if type(plugin) is not TorchCheckpointIO:
            raise TypeError(
                "Invalid `plugins`. Checkpoints and sharded parameters are saved through DurableCheckpointIO, but the "
                f"trainer has {type(plugin).__name__}; remove that plugin."
            )
        writes_all = for_others or isinstance(strategy, ModelParallelStrategy)
        strategy.checkpoint_io = plugin = DurableCheckpointIO() if writes_all else ImpliedCheckpointIO()
    if isinstance(strategy, ModelParallelStrategy) and not isinstance(strategy, _SavesThroughPlugin):
        name = f"Durable{type(strategy).__name__}"
        # The Trainer has already bound this object in many places, so no other object can replace it.
        strategy.__class__ = type(name, (_SavesThroughPlugin, type(strategy)), {})
    return plugin


def remove_plugin(trainer: pl.Trainer) -> None:
    """Undo `install_plugin` in a process that returns its weights to its parent: the parent may lack the plugin."""
    if trains_in_copies(trainer):
        trainer.strategy.checkpoint_io = TorchCheckpointIO()


def url_faults(trainer: pl.Trainer) -> list[str]:
    """Return a fault for each callback of `trainer` that would save to a URL, if plugin or sharding forbids it."""
    plugin, is_model_parallel = trainer.strategy.checkpoint_io, isinstance(trainer.strategy, ModelParallelStrategy)
    writes_all = isinstance(plugin, DurableCheckpointIO) and not isinstance(plugin, ImpliedCheckpointIO)
    if not writes_all and not is_model_parallel:
        return []
    faults = []
    for callback in (each for each in callbacks_of(trainer) if isinstance(each, ModelCheckpoint)):
        loggers = (logger.save_dir for logger in trainer.loggers)
        try:
            local_path(callback.dirpath or next(loggers, None) or trainer.default_root_dir)
        except ValueError as error:
            faults.append(f"{type(callback).__name__}: {error}")
    return faults


def keep_sharded_for(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Return a context for collecting a state that `strategy` will save: sharded tensors stay sharded if it can."""
    return contextlib.nullcontext() if rank_groups_of(strategy) is None else keep_sharded()


def rank_groups_of(strategy: Strategy) -> RankGroups | None:
    """Return the channels of the ranks for a save that all of them write; None if only rank zero writes."""
    return strategy.rank_groups if isinstance(strategy, _SavesThroughPlugin) else None


class _SavesThroughPlugin(ModelParallelStrategy):
    """A `ModelParallelStrategy` that saves and loads through the plugin, like its base class `Strategy`."""

    checkpoint_io: DurableCheckpointIO

    @functools.cached_property
    def rank_groups(self) -> RankGroups:
        return RankGroups()

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with keep_sharded():
            return Strategy.lightning_module_state_dict(self)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with keep_sharded():
            complete_state(optimizer)
            state = _by_number(optimizer, Strategy.optimizer_state(self, optimizer))
        return with_placements(list(parameters_of(optimizer)), state) if "state" in state else state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        plugin = self.checkpoint_io
        plugin.store.save(local_path(filepath), checkpoint, asynchronous=plugin.asynchronous, groups=self.rank_groups)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.store.load(local_path(checkpoint_path), groups=self.rank_groups)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        parameters = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        weights = checkpoint["state_dict"]
        placed = type(weights)((name, _place(value, parameters.get(name))) for name, value in weights.items())
        if hasattr(weights, "_metadata"):
            placed._metadata = weights._metadata
        Strategy.load_model_state_dict(self, {**checkpoint, "state_dict": placed}, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            # A wrapped optimizer may have another form of state dict.
            place_state(list(parameters_of(optimizer)), state) if "state" in state else state
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ]
        Strategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})


def _place(value: Any, parameter: torch.Tensor | None) -> Any:
    """Return a loaded tensor, sharded like its parameter if the shapes are equal."""
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if is_whole and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return sharded_like(value, parameter)
    return value


def _by_number(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with the numbers of parameters in place of their addresses, which differ between processes."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}

    def rename(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {numbers.get(key, key) if type(key) is int else key: rename(each) for key, each in value.items()}

    result: dict[str, Any] = rename(state)
    return result
