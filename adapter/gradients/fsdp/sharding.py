"""Shards the modules of a trainer over the ranks by FSDP 2, after ``configure`` built them as for one device.

The trainer notices nothing: its modules stay the same objects, its optimizers hold the sharded parameters, and
``state_dict`` of either gives (and ``load_state_dict`` takes) whole tensors. Both talk to the other ranks then, so all
ranks must call them. For a checkpoint the tensors are whole in looks only, and nothing is gathered unless the trainer
uses their values, which all ranks must do then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

from ....callbacks.checkpoint.sharded.boxes import sharded_like
from ....callbacks.checkpoint.sharded.lazy_tensor import WholeTensor, whole
from ....callbacks.checkpoint.sharded.strategy import save_through_plugin
from ....callbacks.optimizer_state import map_values
from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered, Found
from ...discovery.parameter_aliases import Alias
from ..ddp.buffers import broadcast_from_zero
from ..torch_internals import require_fsdp
from . import values as sharded_values, writes as shard_writes
from .compiled_code import keep_compiled_code_apart
from .hooks import adopt_hooks
from .layout import copies, ordered_hooks, places, sharded_together, with_inner_optimizers
from .units import govern

__all__ = ["ShardPolicy", "shard", "shard_copies", "shard_for", "whole_metrics", "whole_payload"]

ShardPolicy = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""What becomes a unit of its own, beside each module as a whole: ``"whole"`` for nothing, else the class names of
blocks, or a function of a submodule's name and the submodule. A block with a tied parameter stays with its parent."""

SHOWN_FAULTS = 5
"""How many of the reasons are named why a trainer cannot be sharded."""

_NEVER_CALLED = (nn.ParameterDict, nn.ParameterList)
"""Modules without a forward in which FSDP could work; they stay whole, and their gradients are averaged."""


def shard_for(strategy: Strategy, discovered: Discovered, policy: ShardPolicy = "whole") -> bool:
    """Shard what was discovered where `strategy` asks for it, and say whether it did.

    To be called in ``configure_model``, right after ``configure``, on every rank.

    Raises:
        ContractError: As `shard` does.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return False
    shard(discovered, strategy.device_mesh["data_parallel"], policy, strategy.root_device)
    save_through_plugin(strategy)
    return True


def shard(
    discovered: Discovered, mesh: DeviceMesh, policy: ShardPolicy = "whole", device: torch.device | None = None
) -> None:
    """Shard the trained modules and their EMA copies over `mesh`, beginning with the weights of its first rank.

    All modules are moved to `device` first; None is the host.

    An EMA copy is an untrained module whose parameters have the names and shapes of a trained one's; other untrained
    modules stay whole on every rank. State that an optimizer already holds is sharded with its parameter.

    Every rank must call the same modules in the same order, or at least parts of the same ones. Modules that share
    parameters become one unit, and so does a container such as a ModuleList.

    Raises:
        ContractError: Names what cannot be sharded: an LBFGS, an embedding with sparse gradients, a parameter or a copy
            of one in a tuple, or a policy that matches no submodule.
    """
    require_fsdp()
    modules = [m for m in (*discovered.trained, *_copies(discovered)) if not isinstance(m.value, _NEVER_CALLED)]
    kept = places(discovered)
    copied = [*copies(discovered, kept)]
    _check_shardable(discovered, modules, kept, copied)
    # Each rank keeps its slice of its own weights, so they must be equal before they are sliced; and on the device
    # before they are sent, since a group of a device may have no way to send what is on the host.
    group = mesh.get_group()
    for m in discovered.modules:
        m.value.to(device or torch.device("cpu"))
    broadcast_from_zero([t for m in discovered.modules for t in (*m.value.parameters(), *m.value.buffers())], group)
    optimizers = with_inner_optimizers(discovered)
    is_unit = _unit_test(policy)
    matched = 0
    replaced: dict[int, Tensor] = {}
    for together in sharded_together(modules):
        before = together.parameters_by_place()
        units = [
            (name, sub)
            for found in together.members
            for name, sub in found.value.named_modules()
            if name and is_unit(name, sub)
        ]
        matched += len(units)
        # Inner units first: fully_shard gives a unit what no unit inside of it has taken.
        own = {id(unit): unit for _, unit in units if not together.is_shared_beyond(unit)}
        for unit in (*reversed(own.values()), together.root):
            fully_shard(unit, mesh=mesh, ignored_params=_scalars(unit))
        govern(together.root, together.path)
        after = together.parameters_by_place()
        sharded = {id(before[place]): cast("Tensor", after[place]) for place in before}
        keep_compiled_code_apart(sharded.values())
        replaced |= sharded
        _repoint(optimizers, sharded)
        for alias in kept:
            if alias.put is not None and id(alias.value) in sharded:
                alias.put(sharded[id(alias.value)])
        for (module, name), parameter in before.items():
            if after[module, name] is not parameter:
                adopt_hooks(module, name, parameter)
        for found in together.members:
            _give_whole_state_dicts(found.value)
    if policy != "whole" and not matched:
        raise ContractError(
            f"Invalid `policy`. Expected class names of submodules, but {policy!r} matches none in "
            f"{', '.join(found.path for found in modules)}."
        )
    _shard_copies((alias, replaced.get(id(parameter), parameter)) for alias, parameter in copied)
    for optimizer in optimizers:
        ordered_hooks(optimizer.value)
        optimizer.value.register_state_dict_post_hook(_whole_optimizer_state)
        optimizer.value.register_load_state_dict_pre_hook(_sharded_optimizer_state)


def shard_copies(discovered: Discovered) -> None:
    """Shard the copies of sharded parameters that a trainer keeps in lists and dicts, and has just loaded."""
    _shard_copies([*copies(discovered, places(discovered))])


def whole_metrics(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """`metrics` without sharded values, such as the norm that clipping returns; to be called by all ranks.

    A rank that read such a value alone, for a log, would wait for the others for ever.
    """
    if not any(isinstance(value, DTensor) for value in metrics.values()):
        return metrics
    return {name: whole(value) for name, value in metrics.items()}


def whole_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """What a trainer's ``state_dict`` returned, without tensors that look like one rank's part."""
    made: dict[str, Any] = tree_map(whole, payload)
    return made


def _shard_copies(copied: Iterable[tuple[Alias, Tensor]]) -> None:
    for alias, parameter in copied:
        if alias.put is not None:
            alias.put(_like(alias.value, parameter))


def _scalars(unit: nn.Module) -> set[nn.Parameter]:
    """Parameters that no dimension can be split of; they stay whole, and their gradients are averaged."""
    return {p for p in unit.parameters() if p.dim() == 0}


def _copies(discovered: Discovered) -> list[Found[nn.Module]]:
    trained = [_shapes(found.value) for found in discovered.trained]
    return [found for found in discovered.untrained if _is_copy(_shapes(found.value), trained)]


def _is_copy(shapes: dict[str, Any], trained: list[dict[str, Any]]) -> bool:
    # torch's AveragedModel keeps its copy under `module.`.
    inner = {name.removeprefix("module."): shape for name, shape in shapes.items()}
    return bool(shapes) and any(candidate in (shapes, inner) for candidate in trained)


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: (tuple(p.shape), p.dtype) for name, p in module.named_parameters()}


def _check_shardable(
    discovered: Discovered, modules: list[Found[nn.Module]], kept: list[Alias], copied: list[tuple[Alias, Tensor]]
) -> None:
    owners = {id(p): f"{found.path}.{name}" for found in modules for name, p in found.value.named_parameters()}
    faults = []
    faults += [
        f"{alias.path} is a parameter of {owners[id(alias.value)]}, which sharding replaces; "
        "ask the module for its parameters when you need them, or keep them in a list"
        for alias in kept
        if alias.put is None and id(alias.value) in owners
    ]
    faults += [
        f"{found.path} is a DistributedDataParallel of its own; leave it out, since genlight keeps the ranks equal"
        for found in modules
        if isinstance(found.value, DistributedDataParallel)
    ]
    faults += [
        f"{alias.path} is a copy of a parameter in a tuple, which sharding would have to follow; keep copies in a list"
        for alias, _ in copied
        if alias.put is None
    ]
    faults += [
        f"{found.path}{name and f'.{name}'} is an embedding with sparse gradients; leave out `sparse=True`"
        for found in modules
        for name, sub in found.value.named_modules()
        if getattr(sub, "sparse", False) is True
    ]
    faults += [
        f"{found.path} is a module of TorchScript, which cannot be sharded; leave out torch.jit, or use ddp"
        for found in modules
        if isinstance(found.value, torch.jit.ScriptModule)
    ]
    faults += [
        f"{found.path} is LBFGS, which needs all parameters in one vector"
        for found in discovered.optimizers
        if isinstance(found.value, LBFGS)
    ]
    if faults:
        more = f"; and {len(faults) - SHOWN_FAULTS} more like these" if len(faults) > SHOWN_FAULTS else ""
        raise ContractError("The trainer cannot be sharded: " + "; ".join(faults[:SHOWN_FAULTS]) + more + ".")


def _unit_test(policy: ShardPolicy) -> Callable[[str, nn.Module], bool]:
    if callable(policy):
        return policy
    names = {policy} if isinstance(policy, str) else set(policy)
    return lambda _, module: type(module).__name__ in names


@torch.no_grad()
def _repoint(optimizers: list[Found[Optimizer]], sharded: dict[int, Tensor]) -> None:
    """Let the optimizers hold the sharded parameters, with the state that they had for the whole ones."""
    for found in optimizers:
        optimizer = found.value
        for group in optimizer.param_groups:
            for i, old in enumerate(group["params"]):
                new = sharded.get(id(old))
                if new is None or new is old:
                    continue
                group["params"][i] = new
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    optimizer.state[new] = map_values(functools.partial(_like, parameter=new), state)


def _like(value: Any, parameter: Tensor) -> Any:
    """`value` sharded as `parameter` is, where it is a tensor of the same shape, such as a moment."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    if isinstance(value, WholeTensor):
        return sharded_like(value, parameter)
    value = value.detach().to(device=parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _give_whole_state_dicts(module: nn.Module) -> None:
    for submodule in module.modules():
        submodule.register_state_dict_post_hook(_whole_module_state)  # type: ignore[no-untyped-call]
        submodule.register_load_state_dict_pre_hook(_sharded_module_state)  # type: ignore[no-untyped-call]


def _whole_module_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module._parameters.items():
        if prefix + name in state_dict and parameter is not None:
            sharded_values.announce("state_dict", parameter)
            state_dict[prefix + name] = whole(state_dict[prefix + name])
            shard_writes.gave(parameter, state_dict[prefix + name])


def _sharded_module_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    shard_writes.changed()
    for name, parameter in module._parameters.items():
        if prefix + name in state_dict and parameter is not None:
            state_dict[prefix + name] = _like(state_dict[prefix + name], parameter)


def _whole_optimizer_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    # The inner dicts are the optimizer's own and must not be changed.
    state = {i: map_values(whole, entry) for i, entry in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _sharded_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(_numbered(optimizer))
    state = {
        i: map_values(functools.partial(_like, parameter=parameters[i]), entry) if i in parameters else entry
        for i, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _numbered(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    """The parameters under the numbers that ``state_dict`` gives them."""
    return enumerate(p for group in optimizer.param_groups for p in group["params"])
