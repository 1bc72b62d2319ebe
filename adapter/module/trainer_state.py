"""What a checkpoint holds of a trainer class beside weights and optimizers: put in for a save, given back on resume."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks.checkpoint.saving import CONTRACT_KEY
from ..contract.exceptions import CheckpointError, ContractError
from ..contract.types import StepContext, TrainerPlugin
from ..discovery.discover import Discovered, Found, discover
from ..discovery.wrapped_optimizers import KeptByWrapper
from ..gradients.fsdp.sharding import shard_copies, whole_payload
from ..gradients.hook_state import kept_hook_state
from ..gradients.step import StepRouter
from .plugin_loading import optional_hook
from .rank_state import take_own_part
from .rollout import PHASE
from .trainer_files import trainer_directory

__all__ = [
    "ToRestore",
    "buffer_shapes",
    "load_weights",
    "payload_of",
    "put_into_checkpoint",
    "restore",
    "take_from_checkpoint",
    "unmanaged_by_lightning",
]

log = logging.getLogger(__name__)

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)

_GRADIENTS_WAIT = "gradients_wait"
"""The member of a checkpoint's contract part that is there where gradients have not been averaged yet."""


_RESIZED = "resized"
"""The member that names the buffers whose shape changed while training."""

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""What schedulers of torch, which a trainer may make later, put into groups."""


@dataclass(frozen=True)
class ToRestore:
    """What the trainer is handed before the first step of a resumed run."""

    payload: dict[str, Any] | None
    """For the trainer's ``load_state_dict``; None does not call it."""
    trainer_directory: Path | None
    """For the trainer's ``load_checkpoint``; None does not call it."""
    unmanaged: Mapping[str, Any] = field(default_factory=dict)
    """By path, the states of what Lightning does not save."""
    own_weights: Mapping[str, Any] = field(default_factory=dict)
    """Weights that this rank has otherwise than rank zero."""
    gradients_wait: bool = False
    """Whether gradients are each rank's own, and wait for an update."""
    phase: Mapping[str, Any] = field(default_factory=dict)
    """The rollout that is being trained, and the state of environments."""


def payload_of(plugin: TrainerPlugin, state: Any, *, is_sharded: bool) -> dict[str, object]:
    """What the trainer's ``state_dict`` returns, without tensors that look like one rank's part.

    Raises:
        ContractError: It is not a dict.
    """
    payload = plugin.state_dict(state)
    if not isinstance(payload, dict):
        raise ContractError(f"state_dict returned a {type(payload).__qualname__}; it must be a dict")
    return whole_payload(payload) if is_sharded else payload


def unmanaged_by_lightning(
    discovered: Discovered, kept_by_wrappers: Sequence[KeptByWrapper], trainer: pl.Trainer
) -> Iterator[tuple[str, Any]]:
    """What Lightning does not save: scalers, further schedulers, what wrappers of optimizers and a hook of DDP keep."""
    managed = {id(config.scheduler) for config in trainer.lr_scheduler_configs}
    kept: list[Found[Any]] = [*discovered.scalers, *discovered.schedulers]
    for found in kept:
        if id(found.value) not in managed:
            yield found.path, found.value
    yield from ((kept.path, kept) for kept in kept_by_wrappers)
    hook_state = kept_hook_state(trainer.strategy)
    if hook_state is not None:
        yield "strategy.ddp_comm_state", hook_state


def put_into_checkpoint(
    checkpoint: dict[str, Any],
    trainer: pl.Trainer,
    payload: dict[str, object],
    unmanaged: Iterator[tuple[str, Any]],
    metrics: Mapping[str, Tensor],
    router: StepRouter | None,
    resized: Sequence[str],
) -> None:
    """Add the contract's part to a checkpoint of Lightning's; `resized` are buffers with other shapes than built."""
    parts = checkpoint.setdefault(CONTRACT_KEY, {})
    if resized:
        parts[_RESIZED] = list(resized)
    parts["state"] = payload
    if router is not None and router.averaging is not None and router.averaging.waits:
        parts[_GRADIENTS_WAIT] = True
    if "lr_schedulers" in checkpoint:  # not where weights alone are saved
        kinds = [config.scheduler for config in trainer.lr_scheduler_configs]
        checkpoint["lr_schedulers"] = list(map(_without_functions, kinds, checkpoint["lr_schedulers"]))
    parts["unmanaged"] = {path: _without_functions(kept, kept.state_dict()) for path, kept in unmanaged}
    # For monitors that look at the end of an epoch, where a resume from its last step has no step before that.
    numbers = {name: value for name, value in metrics.items() if value.numel() == 1}
    parts["metrics"] = {name: float(value) for name, value in numbers.items() if not value.is_complex()}


def _without_functions(kept: Any, state: Any) -> Any:
    """The state of a scheduler without functions, of which it keeps on a resume what ``configure`` gave it.

    Torch's own leave theirs out; of a class of the user's, ``LRScheduler.state_dict`` gives all attributes.
    """
    if not isinstance(kept, LRScheduler) or type(kept).load_state_dict is not LRScheduler.load_state_dict:
        return state
    return {name: value for name, value in state.items() if not isinstance(value, _FUNCTIONS)}


def take_from_checkpoint(
    checkpoint: dict[str, Any], module: pl.LightningModule, plugin: TrainerPlugin, discovered: Discovered
) -> ToRestore:
    """What the contract's part of a checkpoint has for this rank; the rest of its copy becomes this rank's too.

    Args:
        checkpoint: What Lightning loaded.
        module: Hosts the trainer; its buffers get the shapes that they had.
        plugin: The trainer.
        discovered: What the trainer built.

    Raises:
        BrokenCheckpointError: The parts of the ranks do not belong together.
        CheckpointError: It holds the states of other optimizers than the trainer built.
    """
    trainer = module.trainer
    own_weights = take_own_part(checkpoint, trainer.global_rank, trainer.world_size)
    parts = checkpoint[CONTRACT_KEY]
    check_optimizers(discovered.optimizers, checkpoint.get("optimizer_states", ()))
    fit_buffers(module, checkpoint["state_dict"], parts.get(_RESIZED, ()))
    return ToRestore(
        payload=parts.get("state"),
        trainer_directory=trainer_directory(trainer.ckpt_path, plugin),
        unmanaged=parts.get("unmanaged", {}),
        own_weights=own_weights,
        gradients_wait=_GRADIENTS_WAIT in parts,
        phase=parts.get(PHASE, {}),
    )


def check_optimizers(optimizers: Sequence[Found[Optimizer]], states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states of another kind of optimizer, or of other groups, which would fail within a step.

    A release of torch adds a setting or drops one; only of another kind of optimizer some lack and others are new.

    Raises:
        CheckpointError: Names the optimizer, what it had and has, and the way out.
    """
    for found, state in zip(optimizers, states, strict=False):
        saved, built = state.get("param_groups"), found.value.param_groups
        if saved is None:  # an optimizer may have a state_dict of its own
            continue
        had, has = _sizes(saved), _sizes(built)
        if had != has:
            raise CheckpointError(
                f"{found.path} had groups of {had} parameters when the checkpoint was saved, and has groups of {has} "
                "now. Build the same groups in `configure`."
            )
        for group, own in zip(saved, built, strict=True):
            lacking = sorted(found.value.defaults.keys() - group.keys())
            foreign = sorted(group.keys() - own.keys() - _OF_SCHEDULERS)
            if lacking and foreign:
                raise CheckpointError(
                    f"{found.path} is now {type(found.value).__name__}, with {', '.join(lacking)}; the optimizer of "
                    f"the checkpoint had {', '.join(foreign)} instead. Build the optimizer as it was, or start at "
                    "step 0 with `genlight run --fresh`, of a fit `--resume never`."
                )


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def buffer_shapes(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """The shapes of all buffers of `module`, by name; None of one that has no value yet."""
    return {
        f"{path}.{name}".removeprefix("."): None if buffer is None else tuple(buffer.shape)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if not isinstance(buffer, UninitializedBuffer)
    }


def fit_buffers(module: nn.Module, weights: Mapping[str, Any], resized: Collection[str]) -> None:
    """Give buffers of `module`, which were `resized` while training, the shapes that they have in `weights`.

    `configure` builds a queue empty that fills up, and statistics without a value that get their first in a step.
    """
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)
    for name in resized:
        path, _, leaf = name.rpartition(".")
        value = weights.get(name)
        owner = module.get_submodule(path)
        built = owner._buffers.get(leaf)
        # Torch gives a lazy one the shape of what it loads.
        if isinstance(value, Tensor) and not isinstance(built, UninitializedBuffer):
            dtype = value.dtype if built is None else built.dtype
            owner.register_buffer(leaf, torch.empty(value.shape, dtype=dtype, device=device))


def load_weights(
    checkpoint: Mapping[str, Any], module: pl.LightningModule, plugin: TrainerPlugin, path: Any, *, strict: bool
) -> ToRestore:
    """Give a module, which no Lightning trainer runs, the weights of a checkpoint; what its trainer is to get then."""
    parts, weights = checkpoint.get(CONTRACT_KEY, {}), checkpoint.get("state_dict")
    if weights is not None:
        fit_buffers(module, weights, parts.get(_RESIZED, ()))
        module.load_state_dict(weights, strict=strict)
    return ToRestore(parts.get("state"), trainer_directory(path, plugin))


def restore(
    waiting: ToRestore,
    module: pl.LightningModule,
    plugin: TrainerPlugin,
    state: Any,
    ctx: StepContext,
    discovered: Discovered,
    kept_by_wrappers: Sequence[KeptByWrapper],
    router: StepRouter | None,
    is_sharded: bool,
) -> None:
    """Hand the trainer, and what Lightning does not restore, what `waiting` holds."""
    if router is not None and router.averaging is not None:
        router.averaging.waits = waiting.gradients_wait
    _warn_of_scripted_modules(discovered)
    if waiting.own_weights:
        module.load_state_dict(waiting.own_weights, strict=False)
    if waiting.unmanaged:
        for path, kept in unmanaged_by_lightning(discovered, kept_by_wrappers, module.trainer):
            if path in waiting.unmanaged:
                kept.load_state_dict(waiting.unmanaged[path])
    payload, directory = waiting.payload, waiting.trainer_directory
    if payload is not None:
        plugin.load_state_dict(state, payload, ctx)
    load_checkpoint = optional_hook(plugin, "load_checkpoint")
    if directory is not None and load_checkpoint is not None:
        load_checkpoint(state=state, checkpoint_dir=str(directory), payload=payload or {}, ctx=ctx)
    if is_sharded:
        shard_copies(discover(state, plugin, reserved=dir(module), host=module))


def _warn_of_scripted_modules(discovered: Discovered) -> None:
    scripted = [
        found.path
        for found in discovered.modules
        if any(isinstance(module, torch.jit.ScriptModule) for module in found.value.modules())
    ]
    if scripted:
        log.warning(
            "%s is compiled by TorchScript, which optimizes after its first calls in a process: the resumed run "
            "rounds differently for some steps, and may not be bit-equal to one that was never interrupted. "
            "torch.compile, or the bare module, is exact.",
            ", ".join(scripted),
        )
