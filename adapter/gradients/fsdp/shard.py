"""Shards the modules of a trainer class over the ranks by FSDP 2, after ``configure`` built them as for one device.

The trainer needs no change: its modules stay the same objects, and its optimizers and lists hold the sharded
parameters. Each module with a ``forward`` becomes a unit, also inside a container without a ``forward``; so do parts
whose class `units` lists. Parameters that no call of a unit gathers stay unsharded, and their gradients are averaged as
under DDP: scalars, parameters of the container itself, all parameters of modules that share some, and those that
`Sharding.ignored` names.

A state dict of a sharded module or optimizer has shards within a training step, as in torch: a write to them changes
the weights, and another sharded module can load them. Outside of a step it has full tensors, for files and for code
without support for sharding, and shards can load full tensors; all ranks must call ``state_dict`` and
``load_state_dict`` together there. When a checkpoint is saved, nothing is gathered; when one is loaded, each rank reads
only the values of its shards.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.compiler.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

from ....callbacks.checkpoint.sharded.optimizer_placements import place_state, with_placements
from ....callbacks.checkpoint.sharded.slices import WholeTensor, sharded_like, whole as gathered
from ....callbacks.optimizer_state import map_values, parameters_of
from ...contract.exceptions import ContractError
from ...discovery.children import Reference
from ...discovery.discover import Discovered, Found
from ...discovery.wrapped_optimizers import walk_optimizer, with_inner_optimizers
from ..ddp.buffers import broadcast_from_zero
from ..refused import REFUSED, WITH_DDP
from ..torch_internals import post_accumulate_hooks, require_fsdp
from .tensors import is_in_step

log = logging.getLogger(__name__)

SHOWN_FAULTS = 5
"""Number of reasons in the error for a trainer that cannot be sharded."""


@dataclass(frozen=True)
class Sharding:
    """Settings of sharding; `FSDP2Strategy` documents them, under the same names."""

    units: Sequence[str] = ()
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    reshard_after_forward: bool | None = None
    cpu_offload: bool = False
    ignored: Sequence[str] = ()
    forward_methods: Sequence[str] = ()
    unused_parameters: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            _dtype(name, getattr(self, name))

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """The types as a policy of torch."""
        return MixedPrecisionPolicy(
            param_dtype=_dtype("param_dtype", self.param_dtype),
            reduce_dtype=_dtype("reduce_dtype", self.reduce_dtype),
            output_dtype=_dtype("output_dtype", self.output_dtype),
            cast_forward_inputs=self.cast_forward_inputs,
        )


def _dtype(argument: str, name: str | None) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name.removeprefix("torch."), None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"Invalid `{argument}`: {name!r}. Expected a floating-point type of torch, such as 'bfloat16'")
    return dtype


_shardings: WeakKeyDictionary[nn.Module, Sharding] = WeakKeyDictionary()


def sharding_of(unit: nn.Module) -> Sharding:
    """Return the settings with which `unit` was sharded."""
    return _shardings[unit]


def shard(
    discovered: Discovered, mesh: DeviceMesh, sharding: Sharding | None = None, device: torch.device | None = None
) -> None:
    """Shard the trained modules and their EMA copies over `mesh`, starting from the weights of its first rank.

    An EMA copy is an untrained module whose parameters have the shapes and dtypes of a trained module's parameters.
    Other untrained modules stay unsharded. State that an optimizer already holds is sharded with its parameter.

    Args:
        discovered: The trainer's objects.
        mesh: The ranks. In a mesh of two dimensions, the first replicates the shards of the second.
        sharding: The settings; None means the defaults.
        device: Device of this rank, to which all modules are moved; None is the host.

    Raises:
        ContractError: An object cannot be sharded, or a setting matches nothing; names it by its path.
        ImportError: This torch cannot do what `sharding` asks for; names the releases that can.
    """
    sharding, device = sharding or Sharding(), device or torch.device("cpu")
    require_fsdp(unused_parameters=sharding.unused_parameters)
    optimizers = with_inner_optimizers(discovered)
    modules = [*discovered.trained, *_ema_copies(discovered)]
    kept = _tensors_outside_modules(discovered, optimizers)
    called = [unit for found in modules for unit in _callable_parts(found.path, found.value)]
    whole = _unsharded_parameters(modules, called, sharding)
    units = _units(called, sharding, whole)
    faults = [*_faults(discovered, modules, kept), *_faults_of_settings(modules, units, sharding)]
    if faults:
        more = f"; and {len(faults) - SHOWN_FAULTS} more like these" if len(faults) > SHOWN_FAULTS else ""
        raise ContractError(f"FSDP 2 cannot shard this class: {'; '.join(faults[:SHOWN_FAULTS])}{more}; {WITH_DDP}.")
    # Each rank keeps a slice of its weights, so the weights must be equal on all ranks before they are sliced. They are
    # moved before they are sent, since the process group of a device may not be able to send tensors on the host.
    for found in discovered.modules:
        found.value.to(device)
    tensors = [t for found in discovered.modules for t in (*found.value.parameters(), *found.value.buffers())]
    broadcast_from_zero(tensors, dist.group.WORLD if mesh.ndim > 1 else mesh.get_group())
    before = {found.path: _by_place(found.value) for found in modules}
    for _, unit in units:
        _shard_unit(unit, mesh, sharding, whole)
    replaced: dict[int, Tensor] = {}
    for found in modules:
        after = _by_place(found.value)
        replaced |= {id(old): after[place] for place, old in before[found.path].items() if after[place] is not old}
        _convert_state_dicts(found.value)
    _keep_compiled_code_apart(replaced.values())
    for alias in kept:
        if alias.put is not None and id(alias.value) in replaced:
            alias.put(replaced[id(alias.value)])
    for optimizer in optimizers:
        _repoint(optimizer.value, replaced)
        _convert_optimizer_state_dicts(optimizer.value)


def _shard_unit(unit: nn.Module, mesh: DeviceMesh, sharding: Sharding, whole: Collection[nn.Parameter]) -> None:
    fully_shard(
        unit,
        mesh=mesh,
        # Outside of training the class sees only shards, so that writes to weights (swapping in an average, clipping)
        # are never lost; `ShardedStep` keeps gathered weights in steps.
        reshard_after_forward=True,
        mp_policy=sharding.mixed_precision,
        offload_policy=CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy(),
        ignored_params={p for p in unit.parameters() if p in whole},
    )
    for name in sharding.forward_methods:
        if hasattr(unit, name):
            register_fsdp_forward_method(unit, name)
    _shardings[unit] = sharding


def _callable_parts(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that can be called: `module`, or the ones in it if it has no ``forward``."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    if is_scripted or type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield path, module
    else:
        for name, child in module.named_children():
            yield from _callable_parts(f"{path}.{name}", child)


def _unsharded_parameters(
    modules: Sequence[Found[nn.Module]], called: Sequence[tuple[str, nn.Module]], sharding: Sharding
) -> set[nn.Parameter]:
    """Return the parameters that stay unsharded; the docstring of the module has the reasons."""
    owners = Counter(p for _, module in called for p in set(module.parameters()))
    shared = [path for path, module in called if any(owners[p] > 1 for p in module.parameters())]
    if shared:
        log.warning(
            "%s share parameters, but FSDP 2 would gather them for only one of these modules: they stay whole on every "
            "rank. To shard them, put these modules into one module and call that",
            " and ".join(shared),
        )
    whole = {p for path, module in called if path in shared for p in module.parameters()}
    for found in modules:
        for name, parameter in found.value.named_parameters(remove_duplicate=False):
            is_ignored = any(fnmatch.fnmatch(name, pattern) for pattern in sharding.ignored)
            if parameter.dim() == 0 or parameter not in owners or is_ignored:
                whole.add(parameter)
    return whole


def _units(
    called: Sequence[tuple[str, nn.Module]], sharding: Sharding, whole: Collection[nn.Parameter]
) -> list[tuple[str, nn.Module]]:
    """Return the units, inner ones first, because ``fully_shard`` shards the parameters that no inner unit has."""
    units: dict[nn.Module, str] = {}
    for path, module in called:
        if all(p in whole for p in module.parameters()):
            continue
        inner = [
            (f"{path}.{name}", part)
            for name, part in module.named_modules()
            if name and type(part).__name__ in sharding.units and not _is_tied_outside(part, module)
        ]
        units |= {part: where for where, part in reversed(inner) if any(p not in whole for p in part.parameters())}
        units[module] = path
    return [(path, module) for module, path in units.items()]


def _is_tied_outside(part: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of `part` is also used outside of it; FSDP needs both places in one unit."""
    inside, parts = set(part.parameters()), set(part.modules())
    return any(p in inside for other in module.modules() if other not in parts for p in other._parameters.values())


def _ema_copies(discovered: Discovered) -> list[Found[nn.Module]]:
    """Return the untrained modules that are EMA copies: each callable part has the shapes of a trained module or part.

    It is enough if the complete module has these shapes.
    """
    trained = {_shapes(part) for found in discovered.trained for part in found.value.modules()}

    def is_copy(module: nn.Module) -> bool:
        called = [part for _, part in _callable_parts("", module) if next(part.parameters(), None) is not None]
        return bool(called) and all(_shapes(part) in trained or _shapes(module) in trained for part in called)

    return [found for found in discovered.untrained if is_copy(found.value)]


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((tuple(p.shape), p.dtype) for p in module.parameters())


def _by_place(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return the parameters of `module` by their places; a shared parameter has several places."""
    return {(m, name): p for m in module.modules() for name, p in m._parameters.items() if p is not None}


def _tensors_outside_modules(discovered: Discovered, optimizers: Sequence[Found[Optimizer]]) -> list[Reference]:
    """Return the tensors that the trainer and its optimizers keep outside of modules, with their places."""
    places = [*discovered.aliases]
    for each in optimizers:
        list(walk_optimizer(each, tensors=places))
    return places


def _faults(discovered: Discovered, modules: Sequence[Found[nn.Module]], kept: Sequence[Reference]) -> Iterator[str]:
    """Yield a message for each object that sharding would break."""
    for optimizer in discovered.optimizers:
        if isinstance(optimizer.value, LBFGS):
            yield f"{optimizer.path}: {REFUSED['lbfgs']}"
    for found in modules:
        for name, part in found.value.named_modules():
            path = f"{found.path}{name and f'.{name}'}"
            if isinstance(part, DistributedDataParallel):
                yield f"{path}: {REFUSED['own ddp']}"
            if isinstance(part, torch.jit.ScriptModule):
                yield f"{path}: {REFUSED['torchscript']}"
            if getattr(part, "sparse", False) is True:
                yield f"{path}: {REFUSED['sparse']}"
        for name, parameter in found.value.named_parameters():
            if parameter._backward_hooks or post_accumulate_hooks(parameter):
                yield f"{found.path}.{name}: {REFUSED['hook']}"
    parameters = {id(p) for found in modules for p in found.value.parameters()}
    for alias in kept:
        if alias.put is None and id(alias.value) in parameters:
            yield f"{alias.path}: {REFUSED['parameter in a tuple']}"


def _faults_of_settings(
    modules: Sequence[Found[nn.Module]], units: Sequence[tuple[str, nn.Module]], sharding: Sharding
) -> Iterator[str]:
    """Yield a message for each name in the settings that matches nothing."""
    parts = {type(part).__name__ for _, unit in units for part in unit.modules()}
    names = [name for found in modules for name, _ in found.value.named_parameters()]
    for missing in sorted(set(sharding.units) - parts):
        existing = f"the classes are {', '.join(sorted(parts))}" if parts else "this trainer has no module to shard"
        yield f"`units` has {missing!r}, but no module has this class; {existing}"
    for method in sharding.forward_methods:
        if not any(callable(getattr(unit, method, None)) for _, unit in units):
            yield f"`forward_methods` has {method!r}, but no unit has it ({', '.join(path for path, _ in units)})"
    for pattern in sharding.ignored:
        if not fnmatch.filter(names, pattern):
            yield f"`ignored` has {pattern!r}, but no parameter has such a name; names are {', '.join(names[:5])}…"


@torch.no_grad()
def _repoint(optimizer: Optimizer, replaced: dict[int, Tensor]) -> None:
    """Replace parameters in `optimizer` by their shards, and shard their state."""
    for group in optimizer.param_groups:
        for i, old in enumerate(group["params"]):
            new = replaced.get(id(old))
            if new is None:
                continue
            group["params"][i] = new
            if old in optimizer.state:
                optimizer.state[new] = map_values(functools.partial(_shard_like, new), optimizer.state.pop(old))


def _keep_compiled_code_apart(tensors: Collection[Tensor]) -> None:
    """Give compiled code of this rank a separate cache key, if one of `tensors` has shards of different sizes.

    The key of torch's on-disk cache has the complete shape of a sharded tensor. If shards differ in size, a rank would
    run the code of another rank: its update would change nothing, or write past the end of its shard.
    """
    if any(isinstance(tensor, DTensor) and _is_uneven(tensor) for tensor in tensors):
        own = f"rank {dist.get_rank()}"
        if not torch.compiler.config.cache_key_tag.endswith(own):
            torch.compiler.config.cache_key_tag += f" {own}"


def _is_uneven(tensor: DTensor) -> bool:
    return any(
        tensor.shape[placement.dim] % tensor.device_mesh.size(dimension)  # type: ignore[attr-defined]
        for dimension, placement in enumerate(tensor.placements)
        if placement.is_shard()
    )


def whole_metrics(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `metrics` with full tensors in place of sharded ones, such as a norm from clipping. Collective.

    This is called on all ranks, since reading a sharded value needs all of them: if only rank 0 read one for a log, it
    would wait forever.
    """
    if not any(isinstance(value, DTensor) for value in metrics.values()):
        return metrics
    return {name: gathered(value) for name, value in metrics.items()}


def whole_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a trainer's ``state_dict`` with full tensors in place of sharded ones."""
    complete: dict[str, Any] = tree_map(gathered, payload)
    return complete


def _shard_like(parameter: Tensor, value: Any) -> Any:
    """Return `value` sharded like `parameter` if it is a tensor of the same shape, such as a moment of Adam."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    if isinstance(value, WholeTensor):
        return sharded_like(value, parameter)
    value = value.detach().to(device=parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _convert_state_dicts(module: nn.Module) -> None:
    """Let state dicts of `module` and its parts have full tensors outside of a step."""
    for part in module.modules():
        part.register_state_dict_post_hook(_whole_module_state)  # type: ignore[no-untyped-call]
        part.register_load_state_dict_pre_hook(_sharded_module_state)  # type: ignore[no-untyped-call]


def _convert_optimizer_state_dicts(optimizer: Optimizer) -> None:
    """Let state dicts of `optimizer` have full tensors outside of a step."""
    # A wrapper around another optimizer may keep its hooks in plain dicts, or have none.
    for name in ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"):
        hooks = getattr(optimizer, name, None)
        if not isinstance(hooks, OrderedDict):
            setattr(optimizer, name, OrderedDict(hooks or {}))
    optimizer.register_state_dict_post_hook(_whole_optimizer_state)
    optimizer.register_load_state_dict_pre_hook(_sharded_optimizer_state)


def _whole_module_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters if not is_in_step() else ():
        if prefix + name in state_dict:
            state_dict[prefix + name] = gathered(state_dict[prefix + name])


def _sharded_module_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        if prefix + name in state_dict and parameter is not None:
            state_dict[prefix + name] = _shard_like(parameter, state_dict[prefix + name])


def _whole_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if is_in_step():
        return state_dict
    # The inner dicts belong to the optimizer and must not be changed.
    state = {i: tree_map(gathered, entry) for i, entry in state_dict["state"].items()}
    return {**with_placements(list(parameters_of(optimizer)), state_dict), "state": state}


def _sharded_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return place_state(list(parameters_of(optimizer)), state_dict)
