"""A `ModelParallelStrategy` that saves and restores through the checkpoint plugin: in parts, or whole.

Its own way knows one format per way of sharding, and writes it around the plugin. With `DurableCheckpointIO` every rank
saves the slices that it holds and reads those that it needs, whatever the number of ranks that saved them. With another
plugin, modules and optimizers whose state dicts are whole are saved whole by rank zero, as other strategies do.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from ...hook.events import callbacks_of
from ...optimizer_state import map_values
from ..checkpoint_io import DurableCheckpointIO
from ..format.layout import is_remote, local_path
from .boxes import sharded_like
from .lazy_tensor import keep_sharded, whole
from .rank_channel import RankGroups

__all__ = ["keep_sharded_for", "rank_groups_of", "save_through_plugin", "url_faults"]


def save_through_plugin(strategy: Strategy) -> None:
    """Let a `ModelParallelStrategy` use its checkpoint plugin, as other strategies do by themselves."""
    if isinstance(strategy, ModelParallelStrategy) and not isinstance(strategy, _SavesThroughPlugin):
        name = f"Durable{type(strategy).__name__}"
        # The Trainer has bound this object in many places already, so it cannot be replaced by another one.
        strategy.__class__ = type(name, (_SavesThroughPlugin, type(strategy)), {})


def url_faults(trainer: pl.Trainer) -> list[str]:
    """Which callbacks of `trainer` would save to a URL, which our plugin refuses, and which ranks cannot share."""
    if not isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO) and not isinstance(
        trainer.strategy, ModelParallelStrategy
    ):
        return []
    faults = []
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelCheckpoint):
            place = callback.dirpath or next((logger.save_dir for logger in trainer.loggers), None)
            place = place or trainer.default_root_dir
            if is_remote(place):
                faults.append(
                    f"{type(callback).__name__} saves to {os.fspath(place)!r}, and durable checkpoints go to a local "
                    "file system. Give it a local `dirpath`, and `targets` of UploadArtifacts for copies elsewhere"
                )
    return faults


def keep_sharded_for(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """For the time in which a state is collected that `strategy` will save: sharded tensors stay so if it can."""
    groups = rank_groups_of(strategy)
    return contextlib.nullcontext() if groups is None else keep_sharded(groups.meeting.meet)


def rank_groups_of(strategy: Strategy) -> RankGroups | None:
    """How the ranks speak about a save that all of them write; None where rank zero writes alone."""
    if isinstance(strategy, _SavesThroughPlugin) and isinstance(strategy.checkpoint_io, DurableCheckpointIO):
        return strategy.rank_groups
    return None


class _SavesThroughPlugin(ModelParallelStrategy):
    """The checkpoint methods of `Strategy` itself, for tensors that are sharded."""

    @functools.cached_property
    def rank_groups(self) -> RankGroups:
        return RankGroups()

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with keep_sharded_for(self):
            return Strategy.lightning_module_state_dict(self)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with keep_sharded_for(self):
            return _by_place(optimizer, Strategy.optimizer_state(self, optimizer))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        groups, plugin = rank_groups_of(self), self.checkpoint_io
        if groups is None or not isinstance(plugin, DurableCheckpointIO):
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
        else:
            plugin.store.save(local_path(filepath), checkpoint, asynchronous=plugin.asynchronous, groups=groups)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        groups, plugin = rank_groups_of(self), self.checkpoint_io
        if groups is None or not isinstance(plugin, DurableCheckpointIO):
            return Strategy.load_checkpoint(self, checkpoint_path, weights_only)
        return plugin.store.load_together(local_path(checkpoint_path), groups)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        parameters = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        weights = checkpoint["state_dict"]
        placed = type(weights)((name, _placed(value, parameters.get(name))) for name, value in weights.items())
        if hasattr(weights, "_metadata"):
            placed._metadata = weights._metadata
        Strategy.load_model_state_dict(self, {**checkpoint, "state_dict": placed}, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            _placed_state(optimizer, state)
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ]
        Strategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})


def _placed(value: Any, parameter: torch.Tensor | None) -> Any:
    """A loaded tensor sharded as its parameter is, where it has its shape."""
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if is_whole and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return sharded_like(value, parameter)
    return value


def _by_place(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with a parameter's number where it has its address, which differs between ranks and processes."""
    places = {id(p): number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}

    def renamed(value: Any) -> Any:
        if not isinstance(value, dict):
            return whole(value)
        return {places.get(key, key) if type(key) is int else key: renamed(member) for key, member in value.items()}

    made: dict[str, Any] = renamed(state)
    return made


def _placed_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    if "state" not in state:  # a wrapper's own form of a state dict
        return state
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    placed = {
        number: map_values(functools.partial(_placed, parameter=parameters.get(number)), entry)
        for number, entry in state["state"].items()
    }
    return {**state, "state": placed}
