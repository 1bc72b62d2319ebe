"""The state of a trainer class: what ``configure`` built, and how a checkpoint saves and restores it on each rank.

Lightning saves weights, optimizers and the first scheduler of each optimizer. The contract's part of a checkpoint has
the rest: the result of the trainer's own ``state_dict``, further schedulers and scalers, and, for each rank, the values
that differ from rank zero's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ...callbacks.checkpoint.capture import CONTRACT_KEY
from ...callbacks.checkpoint.codec.state_tree import encode
from ...callbacks.checkpoint.codec.tensors import TensorTable
from ...callbacks.checkpoint.plugins import keep_sharded_for, rank_groups_of
from ...callbacks.checkpoint.rank_state import (
    OPTIMIZER_DEVICES,
    RankDifference,
    apply_differences,
    differences_of_ranks,
    restore_optimizers_as_stored,
    uncompiled_name,
)
from ...callbacks.lightning_internals import attached_trainer
from ...callbacks.optimizer_state import restore_groups
from ...callbacks.rank_channel import Channel
from ..contract.exceptions import CheckpointError, ContractError
from ..contract.types import StepContext, TrainerPlugin
from ..discovery.discover import Discovered, Found, check_unchanged, discover
from ..discovery.rank_local import rank_local_of
from ..discovery.wrapped_optimizers import kept_by_wrappers
from ..gradients.fsdp.shard import whole_payload
from ..gradients.fsdp.tensors import whole_numbers
from ..plumbing.generators import set_state, state_of
from ..plumbing.text import list_first
from .as_built import SET_BY_SCHEDULERS, BuiltSettings, Replaced, without_functions
from .found_state import FoundState
from .plugin_loading import optional_hook
from .trainer_files import trainer_directory

if TYPE_CHECKING:
    from ..gradients.step import StepRouter


log = logging.getLogger(__name__)

STATE = "state"
"""The member of a checkpoint's contract part that holds the result of the trainer's ``state_dict``."""
PHASE = "phase"
"""The member that `RolloutBatches.save` writes."""
_UNMANAGED = "unmanaged"
"""The member that holds, by path, the states of schedulers, scalers and wrapped optimizers."""
_REPLACED = "replaced"
"""The member that names, by path, objects with which training replaced the built ones."""
_AVERAGING = "averaging"
"""The member that holds the state of gradient averaging."""
_ON_DEVICE = "on_device"
"""The member that marks the tensors of the payload that were on a device, in the order of a walk."""
_GENERATORS = "generators"
"""The member that holds, by path, the states of generators of random numbers."""
_FOUND = "found"
"""The member that holds the states of other objects, and attributes of modules, by path."""
_FOUND_ON_DEVICE = "found_on_device"
"""The member that marks the tensors of `_FOUND` that were on a device."""
_CHANGED = "changed"
"""The member that holds fingerprints of the values that training changed, so that a resume can warn of lost ones."""
_BUILT = "built"
"""The member that holds the settings with which optimizers, schedulers and scalers were built."""
_RESIZED = "resized"
"""The member that names the buffers whose shape changed while training."""
_RANK_DIFFERENCES = "of_ranks"
"""The member that holds, for each rank, the values that differ from rank zero's."""
_LIGHTNING_KEYS = ("state_dict", "optimizer_states", "lr_schedulers")
_CONTRACT_KEYS = (STATE, _ON_DEVICE, _UNMANAGED, _FOUND, _FOUND_ON_DEVICE, _GENERATORS, PHASE)
_NAMED_AT_MOST = 8


@dataclass(frozen=True)
class ToRestore:
    """The parts of a checkpoint that are restored before the first step of a resumed run."""

    parts: Mapping[str, Any]
    """Members of a checkpoint's contract part, by name; without `STATE`, ``load_state_dict`` is not called."""
    trainer_directory: Path | None
    """Folder for the trainer's ``load_checkpoint``; None does not call it."""
    own_weights: Mapping[str, Any] = field(default_factory=dict)
    """Weights of this rank that differ from rank zero's."""
    optimizer_states: Sequence[Mapping[str, Any]] = ()
    """The state dicts that Lightning loads into the optimizers."""


class ConfiguredState:
    """The objects that ``configure`` of a trainer built, with their state as it changes while training.

    Args:
        module: Hosts the trainer; the discovered objects are registered in it.
        plugin: The trainer.
        value: The result of ``configure``.
        discovered: The objects found in that result and on the trainer.
        keep: Settings that a resume leaves as ``configure`` built them; see `BuiltSettings`.

    Raises:
        ContractError: `keep` names a setting that nothing has.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        plugin: TrainerPlugin,
        value: Any,
        discovered: Discovered,
        keep: Sequence[str] = (),
    ) -> None:
        self.module = module
        self.plugin = plugin
        self.value = value
        self.discovered = discovered
        self.optimizers = [found.value for found in discovered.optimizers]
        self.is_sharded = False
        """Whether its parameters are shards."""
        self._kept_by_wrappers = kept_by_wrappers(discovered.optimizers)
        self._built_buffers = _buffer_shapes(module)
        self.built_settings = BuiltSettings(discovered, keep)
        self._replaced = Replaced(discovered)
        self._found = FoundState(discovered, module)
        self._warned_of_ranks = False

    def check_unchanged(self) -> Discovered:
        """Discover the trainer's objects again, and return them.

        Raises:
            ContractError: A step built modules or optimizers, or added, removed or resized layers or groups; names the
                path of each.
        """
        return check_unchanged(self.discovered, self.value, self.plugin, host=self.module)

    def optimizer_configs(self) -> list[dict[str, Any]]:
        """Return the optimizers in Lightning's form, each with the first scheduler that drives it."""
        configs: list[dict[str, Any]] = [{"optimizer": optimizer} for optimizer in self.optimizers]
        for found in self.discovered.schedulers:
            for config in configs:
                if getattr(found.value, "optimizer", None) is config["optimizer"] and "lr_scheduler" not in config:
                    config["lr_scheduler"] = {"scheduler": found.value, "interval": "step"}
        return configs

    def payload(self) -> dict[str, object]:
        """Return the result of the trainer's ``state_dict``, with full tensors in place of shards.

        Raises:
            ContractError: It is not a dict.
        """
        payload = self.plugin.state_dict(self.value)
        if not isinstance(payload, dict):
            raise ContractError(f"state_dict returned a {type(payload).__qualname__}; it must be a dict")
        return whole_payload(payload) if self.is_sharded else payload

    def check_storable(self) -> None:
        """Encode optimizers, schedules and scalers once without writing, so that unstorable values fail before step 1.

        ``state_dict`` of the class is not called before the first checkpoint: it may have nothing to return yet.

        Raises:
            UnstorableStateError: A checkpoint cannot hold a value; names its path.
        """
        now = self._discover()
        with keep_sharded_for(self.module.trainer.strategy), whole_numbers():
            for path, state in self._replaced.states(now).items():
                encode(state, TensorTable(), root=path)
            for found in now.optimizers:
                if not hasattr(found.value, "consolidate_state_dict"):  # ZeroRedundancyOptimizer must gather it first
                    encode(found.value.state_dict(), TensorTable(), root=found.path)

    def put_into(self, checkpoint: dict[str, Any], metrics: Mapping[str, Tensor], router: StepRouter | None) -> None:
        """Add the contract's part to a checkpoint.

        Args:
            checkpoint: The checkpoint that Lightning is about to save.
            metrics: Metrics of the last step, for monitors at the end of an epoch: a run that is resumed after the last
                step of an epoch reaches its end before any step.
            router: The router of the training.

        Raises:
            ContractError: `check_unchanged` refuses the objects, or ``state_dict`` did not return a dict.
        """
        trainer, now = self.module.trainer, self.check_unchanged()
        parts = checkpoint.setdefault(CONTRACT_KEY, {})
        with keep_sharded_for(trainer.strategy), whole_numbers():
            parts[STATE] = payload = self.payload()
            parts[_FOUND] = self._found.states(now)
        parts[_ON_DEVICE], parts[_FOUND_ON_DEVICE] = self._on_device(payload), self._on_device(parts[_FOUND])
        parts[_CHANGED] = self._found.changed_values(now)
        parts[_BUILT] = self.built_settings.record()
        parts[_GENERATORS] = {found.path: state_of(found.value) for found in now.generators}
        shapes = _buffer_shapes(self.module).items()
        if resized := [name for name, shape in shapes if self._built_buffers.get(name, "absent") != shape]:
            parts[_RESIZED] = resized
        if router is not None and router.averaging is not None:
            parts[_AVERAGING] = router.averaging.state_dict()
        if "lr_schedulers" in checkpoint:  # absent if only weights are saved
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            checkpoint["lr_schedulers"] = list(map(without_functions, schedulers, checkpoint["lr_schedulers"]))
        wrapped = {kept.path: kept.state_dict() for kept in self._kept_by_wrappers}
        parts[_UNMANAGED] = self._replaced.states(now) | wrapped
        parts[_REPLACED] = self._replaced.record(now, logs=self.module.global_rank == 0)
        numbers = {name: value for name, value in metrics.items() if value.numel() == 1}
        parts["metrics"] = {name: float(value) for name, value in numbers.items() if not value.is_complex()}

    def warn_of_rank_differences(self, checkpoint: Mapping[str, Any]) -> None:
        """Warn once, on rank zero, of numbers in ``state_dict`` that differ between ranks and are not `rank_local`."""
        if self._warned_of_ranks:
            return
        rank_local, of_ranks = rank_local_of(self.plugin), _differences_in(checkpoint[CONTRACT_KEY])
        found = [
            differing
            for of_rank in of_ranks
            for differing in of_rank
            if differing.path[0] == STATE and _has_fractions(differing.value) and str(differing) not in rank_local
        ]
        if found:
            self._warned_of_ranks = True
            log.warning(
                "The %d ranks differ in %s: each rank computed it from its own rows, and a resume restores each rank's "
                "value. If training depends on it (for example, if losses are divided by the first ones), the ranks "
                "train differently: average it over all ranks, broadcast the value of rank 0, or name it in "
                "`rank_local` if this is intended. `genlight check` finds out whether training depends on it.",
                len(of_ranks),
                _list_names(found),
            )

    def take_from(self, checkpoint: dict[str, Any]) -> ToRestore:
        """Return the contract's part of a checkpoint for this rank, and adapt the rest of `checkpoint` to this rank.

        Buffers get the shapes that they had at the save.

        Raises:
            BrokenCheckpointError: The parts of the ranks do not belong together.
            CheckpointError: Its optimizer states do not fit the optimizers that the trainer built.
        """
        trainer = self.module.trainer
        own_weights = take_own_part(checkpoint, trainer.global_rank, trainer.world_size)
        checkpoint["state_dict"] = _rename_as_in(self.module, checkpoint["state_dict"])
        own_weights, parts = _rename_as_in(self.module, own_weights), checkpoint[CONTRACT_KEY]
        _check_optimizers(self.discovered.optimizers, checkpoint.get("optimizer_states", ()))
        _fit_buffers(self.module, checkpoint["state_dict"], parts.get(_RESIZED, ()))
        kept = {name: part for name, part in parts.items() if name != _RANK_DIFFERENCES}
        directory = trainer_directory(trainer.ckpt_path, self.plugin)
        return ToRestore(kept, directory, own_weights, checkpoint.get("optimizer_states", ()))

    def load_weights(self, checkpoint: Mapping[str, Any], path: Any, *, strict: bool) -> ToRestore:
        """Load the weights of a checkpoint at `path` without a Lightning trainer; return the parts still to restore.

        Raises:
            RuntimeError: The weights do not match the class.
        """
        parts, weights = checkpoint.get(CONTRACT_KEY, {}), checkpoint.get("state_dict")
        if weights is not None:
            weights = _rename_as_in(self.module, weights)
            _fit_buffers(self.module, weights, parts.get(_RESIZED, ()))
            self.module.load_state_dict(weights, strict=strict)
        kept = {name: parts[name] for name in (STATE, _ON_DEVICE) if name in parts}
        return ToRestore(kept, trainer_directory(path, self.plugin))

    def restore(self, pending: ToRestore, ctx: StepContext, router: StepRouter | None) -> None:
        """Restore the trainer, and everything that Lightning does not restore, from `pending`."""
        parts, directory = pending.parts, pending.trainer_directory
        if router is not None and router.averaging is not None and _AVERAGING in parts:
            router.averaging.load_state_dict(parts[_AVERAGING])
        _warn_of_scripted_modules(self.discovered)
        if pending.own_weights:
            self.module.load_state_dict(pending.own_weights, strict=False)
        unmanaged, replaced = parts.get(_UNMANAGED, {}), parts.get(_REPLACED, {})
        for kept in self._kept_by_wrappers:
            if kept.path in unmanaged:
                kept.load_state_dict(unmanaged[kept.path])
        loaded = self._replaced.load(unmanaged, replaced, self._discover())
        if _FOUND in parts:
            _move_to_device(parts[_FOUND], parts[_FOUND_ON_DEVICE], ctx.device)
            self._found.load(parts[_FOUND], self._discover())
        payload = parts.get(STATE)
        if payload is not None:
            _move_to_device(payload, parts.get(_ON_DEVICE, ()), ctx.device)
            self.plugin.load_state_dict(self.value, payload, ctx)
        load_checkpoint = optional_hook(self.plugin, "load_checkpoint")
        if directory is not None and load_checkpoint is not None:
            load_checkpoint(state=self.value, checkpoint_dir=str(directory), payload=payload or {}, ctx=ctx)
        # This comes after the hooks of the class, which may load an optimizer again: torch then casts its state.
        restore_optimizers_as_stored(self.optimizers, pending.optimizer_states, parts.get(OPTIMIZER_DEVICES, ()))
        now, is_first = self._discover(), self.module.global_rank == 0
        if _REPLACED in parts:
            made = self._replaced.load(unmanaged, replaced, now, without=loaded)
            driven = {id(getattr(schedule, "optimizer", None)) for schedule in made}
            for optimizer, saved in zip(self.optimizers, pending.optimizer_states, strict=False):
                if id(optimizer) in driven:  # a hook made the schedule, whose constructor has set the learning rate
                    restore_groups(optimizer, saved.get("param_groups", ()))
            self._replaced.check(replaced, now, logs=is_first)
        if attached_trainer(self.module) is not None:  # without a Lightning trainer no optimizer was restored
            self.built_settings.reconcile(parts.get(_BUILT), logs=is_first)
        states = dict(parts.get(_GENERATORS, {}))
        # This comes last, because the hooks above may draw numbers from these generators.
        for found in now.generators:
            if found.path in states:
                set_state(found.value, states.pop(found.path))
        if _CHANGED in parts and is_first:
            self._found.warn_of_lost(parts[_CHANGED], now)
        if states and is_first:
            log.warning(
                "The checkpoint has the state of %s, which does not exist after `configure` and `load_state_dict`. If "
                "training makes it later, its numbers start from the beginning. Build it in `configure`.",
                ", ".join(states),
            )

    def _on_device(self, payload: Mapping[str, Any]) -> list[bool]:
        """Return for each tensor of the payload whether a resume must move it to the device; empty if none.

        Tensors of modules and optimizers stay in host memory, because the device may have no room for a second copy;
        their ``load_state_dict`` copies values from any device. Shards move to their device when they are used.
        """
        owned: list[Any] = []
        for found in self.discovered.modules:
            owned += [*found.value.parameters(), *found.value.buffers()]
        for optimizer in self.optimizers:
            owned += tree_leaves(list(optimizer.state.values()))
        memories = {_memory(tensor) for tensor in owned if isinstance(tensor, Tensor)}
        tensors = [leaf for leaf in tree_leaves(payload) if isinstance(leaf, Tensor)]
        flags = [_memory(tensor) not in memories | {None} for tensor in tensors]
        return flags if any(flags) else []

    def _discover(self) -> Discovered:
        return discover(self.value, self.plugin, reserved=dir(self.module), host=self.module)


def _memory(tensor: Tensor) -> tuple[torch.device, int] | None:
    """Return a key for the device memory of a tensor; None for a tensor in host memory, and for shards."""
    if tensor.device.type in ("cpu", "meta") or type(tensor) not in (Tensor, nn.Parameter):
        return None
    is_dense = tensor.layout is torch.strided
    return tensor.device, tensor.untyped_storage().data_ptr() if is_dense else id(tensor)


def _move_to_device(payload: Mapping[str, Any], on_device: Sequence[bool], device: str) -> None:
    """Move the tensors of the payload that were on a device to `device`, in place."""
    tensors = [leaf for leaf in tree_leaves(payload) if isinstance(leaf, Tensor)] if on_device else []
    for tensor, was_there in zip(tensors, on_device, strict=False):
        if was_there:
            tensor.data = tensor.data.to(device)


def _check_optimizers(optimizers: Sequence[Found[Optimizer]], states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states of another kind of optimizer, or with other groups: a step would fail with such a state.

    A release of torch may add settings, or drop some. If the saved groups both lack settings and have unknown ones,
    they are of another kind of optimizer.

    Raises:
        CheckpointError: Names the optimizer, the difference and the way out.
    """
    for found, state in zip(optimizers, states, strict=False):
        saved, built = state.get("param_groups"), found.value.param_groups
        if saved is None:  # an optimizer may define its own state_dict
            continue
        had, has = _sizes(saved), _sizes(built)
        if had != has:
            raise CheckpointError(
                f"{found.path} had groups of {had} parameters when the checkpoint was saved, and has groups of {has} "
                "now. Build the same groups in `configure`."
            )
        for group, own in zip(saved, built, strict=True):
            lacking = sorted(found.value.defaults.keys() - group.keys())
            foreign = sorted(group.keys() - own.keys() - SET_BY_SCHEDULERS)
            if lacking and foreign:
                raise CheckpointError(
                    f"{found.path} is now {type(found.value).__name__}, with {', '.join(lacking)}; the optimizer of "
                    f"the checkpoint had {', '.join(foreign)} instead. Build the optimizer as it was, or start at "
                    "step 0 with `genlight run --fresh` (`--resume never` for a fit)."
                )


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _rename_as_in(module: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Return `weights` under the names in `module`, since a part may be compiled in one attempt and not in another."""
    if not any("_orig_mod" in name for name in (*weights, *(name for name, _ in module.named_modules()))):
        return weights
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    names = {uncompiled_name(name): name for name, _ in tensors}
    renamed = type(weights)((names.get(uncompiled_name(name), name), value) for name, value in weights.items())
    if hasattr(weights, "_metadata"):
        names = {uncompiled_name(name): name for name, _ in module.named_modules(remove_duplicate=False)}
        versions = ((names.get(uncompiled_name(name), name), each) for name, each in weights._metadata.items())
        renamed._metadata = type(weights._metadata)(versions)  # type: ignore[attr-defined]
    return renamed


def _buffer_shapes(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of all buffers of `module` by name; None for a buffer without a value."""
    return {
        f"{path}.{name}".removeprefix("."): None if buffer is None else tuple(buffer.shape)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if not isinstance(buffer, UninitializedBuffer)
    }


def _fit_buffers(module: nn.Module, weights: Mapping[str, Any], resized: Collection[str]) -> None:
    """Give each buffer of `module` that `resized` names, because training changed its shape, its shape in `weights`.

    For example, `configure` builds an empty queue that training fills, or statistics whose value a step sets first.
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)
    names = {uncompiled_name(name): name for name in weights}
    for name in (names.get(uncompiled_name(each), each) for each in resized):
        path, _, leaf = name.rpartition(".")
        value = weights.get(name)
        owner = module.get_submodule(path)
        built = owner._buffers.get(leaf)
        # Torch itself gives a lazy buffer the shape of the loaded value.
        if isinstance(value, Tensor) and not isinstance(built, UninitializedBuffer):
            dtype = value.dtype if built is None else built.dtype
            owner.register_buffer(leaf, torch.empty(value.shape, dtype=dtype, device=device))


def _warn_of_scripted_modules(discovered: Discovered) -> None:
    """Warn of modules of TorchScript, which may keep a resume from being bit-equal."""
    scripted = [
        found.path
        for found in discovered.modules
        if any(isinstance(module, torch.jit.ScriptModule) for module in found.value.modules())
    ]
    if scripted:
        log.warning(
            "%s is compiled by TorchScript, which optimizes a module after its first calls in a process. The resumed "
            "run rounds differently for some steps, and may not be bit-equal to one that was never interrupted. Use "
            "torch.compile or the plain module for an exact resume.",
            ", ".join(scripted),
        )


def rank_channel_of(trainer: pl.Trainer) -> Channel:
    """Return the channel through which the ranks of a training compare what they save. Collective."""
    groups = rank_groups_of(trainer.strategy) if trainer.world_size > 1 else None
    return Channel() if groups is None else groups.training


def collect_from_ranks(checkpoint: dict[str, Any], trainer: pl.Trainer, channel: Channel) -> None:
    """Add the values of other ranks that differ from rank zero's to `checkpoint` of rank zero. Collective.

    Raises:
        UnstorableStateError: A value of this rank cannot be stored; names its path.
        CheckpointError: An entry that differs between ranks holds a sharded tensor.
    """
    if channel.size == 1:
        return
    own = checkpoint[CONTRACT_KEY]
    compared = {name: own[name] for name in _CONTRACT_KEYS if name in own}
    compared |= {name: checkpoint[name] for name in _LIGHTNING_KEYS if name in checkpoint}
    if "optimizer_states" in compared:
        # Only rank zero has a consolidated state. A resume gives it to every rank, as Lightning does.
        compared["optimizer_states"] = [
            None if hasattr(optimizer, "consolidate_state_dict") else state
            for optimizer, state in zip(trainer.optimizers, compared["optimizer_states"], strict=True)
        ]
    found = differences_of_ranks(compared, channel)
    if any(found):
        checkpoint[CONTRACT_KEY][_RANK_DIFFERENCES] = [
            [{"path": list(differing.path), "value": differing.value} for differing in of_rank] for of_rank in found
        ]


def _differences_in(contract: Mapping[str, Any]) -> list[list[RankDifference]]:
    """Return the values that `collect_from_ranks` added to a checkpoint's contract part, by rank."""
    stored = contract.get(_RANK_DIFFERENCES, [])
    return [[RankDifference(tuple(entry["path"]), entry["value"]) for entry in of_rank] for of_rank in stored]


def _has_fractions(value: Any) -> bool:
    """Whether `value` contains floating-point or complex numbers, unlike generator states and counters."""
    if isinstance(value, Mapping):
        return any(map(_has_fractions, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_fractions, value))
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, float) or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fc")


def take_own_part(checkpoint: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Put this rank's own values into its copy of a loaded `checkpoint`; warn of values that are lost.

    A checkpoint without values of single ranks stays as it is.

    Returns:
        The weights of this rank that differ from rank zero's. They must be loaded again after all ranks got the weights
        of rank zero.

    Raises:
        BrokenCheckpointError: The parts do not belong together.
    """
    contract = checkpoint[CONTRACT_KEY]
    parts = _differences_in(contract)
    if parts and len(parts) != world_size and rank == 0:
        log.warning("%s", _explain_loss(parts, world_size))
    own = parts[rank] if rank < len(parts) else []
    tree = {**checkpoint, **{name: contract[name] for name in _CONTRACT_KEYS if name in contract}}
    apply_differences(tree, own)
    checkpoint |= {name: tree[name] for name in _LIGHTNING_KEYS if name in tree}
    contract |= {name: tree[name] for name in _CONTRACT_KEYS if name in tree}
    if any(differing.path == ("state_dict",) for differing in own):
        return dict(tree["state_dict"])
    return {differing.path[1]: differing.value for differing in own if differing.path[0] == "state_dict"}


def _explain_loss(parts: Sequence[Sequence[RankDifference]], world_size: int) -> str:
    """Describe the values that a resume on another number of ranks cannot restore."""
    head = f"The checkpoint was saved by {len(parts)} ranks and is resumed by {world_size}: "
    if world_size < len(parts):
        lost = [differing for of_rank in parts[world_size:] for differing in of_rank]
        what = f"the values stored for {_format_ranks(world_size, len(parts))} are lost: {_list_names(lost)}"
    else:
        shared = [differing for of_rank in parts for differing in of_rank]
        new = _format_ranks(len(parts), world_size)
        what = f"the ranks had different values of {_list_names(shared)}, and {new} can only get the values of rank 0"
    return f"{head}{what}. The run will not be bit-equal to one that was never interrupted"


def _format_ranks(begin: int, end: int) -> str:
    return f"rank {begin}" if end - begin == 1 else f"ranks {begin} to {end - 1}"


def _list_names(found: Sequence[RankDifference]) -> str:
    return list_first(list(dict.fromkeys(map(str, found))), _NAMED_AT_MOST)
