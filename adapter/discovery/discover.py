"""Find the modules, optimizers, schedulers and scalers that a trainer class built, wherever it put them.

A trainer keeps them in its `state`, of any form, or on itself. Everything that Lightning has to know about (device
moves, checkpoints, gradient sync, sharding) starts from the objects found here, and every rank finds the same objects
in the same order.
"""

from __future__ import annotations

import functools
import random
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import ContractError
from ..plumbing.generators import GENERATORS
from ..plumbing.text import list_first
from .children import ATOMS, Reference, below, is_opaque, keeps_state, uncompiled

T = TypeVar("T")

_NAMED_AT_MOST = 6


@dataclass(frozen=True)
class Found(Generic[T]):
    """One object and its place."""

    path: str
    """The path as the author of the trainer class would write it: ``state["nets"].generator`` or ``trainer.net``."""
    name: str
    """A valid attribute name, unique among the objects of its kind and equal on all ranks."""
    value: T


@dataclass(frozen=True)
class Discovered:
    """The objects that a trainer built, each once, in an order that is equal on all ranks."""

    modules: tuple[Found[nn.Module], ...] = ()
    """Outermost modules; a compiled module is represented by the module that it was compiled from."""
    optimizers: tuple[Found[Optimizer], ...] = ()
    schedulers: tuple[Found[LRScheduler], ...] = ()
    scalers: tuple[Found[GradScaler], ...] = ()
    """The gradient scalers that the trainer made."""
    parameters: tuple[Found[Tensor], ...] = ()
    """Tensors in an optimizer that belong to no found module."""
    tensors: tuple[Found[Tensor], ...] = ()
    """Other tensors, in `state` or on the trainer, outside of modules."""
    aliases: tuple[Reference, ...] = ()
    """Every reference to a tensor that is held outside of a module, such as an item of a list. The tensor itself may be
    a parameter of a found module."""
    generators: tuple[Found[Any], ...] = ()
    """Random number generators of torch, NumPy and Python, also global variables of the Python modules that define the
    trainer class and its bases."""
    stateful: tuple[Found[Any], ...] = ()
    """Other objects with a ``state_dict``."""
    roots: tuple[tuple[str, Any], ...] = ()
    """The state and the trainer, at which the search began; each after the name with which its paths begin."""
    layout: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Shapes of the modules' parameters at discovery, by path (None for a lazy parameter, which gets its shape later);
    and for each optimizer, the number of parameters in each of its groups."""

    @functools.cached_property
    def trained(self) -> tuple[Found[nn.Module], ...]:
        """The modules with a parameter in some optimizer."""
        held = {id(p) for p in self.optimized()}
        return tuple(m for m in self.modules if any(id(p) in held for p in m.value.parameters()))

    @functools.cached_property
    def untrained(self) -> tuple[Found[nn.Module], ...]:
        """The modules without a parameter in any optimizer, such as EMA copies, frozen teachers and metrics."""
        trained = {m.name for m in self.trained}
        return tuple(m for m in self.modules if m.name not in trained)

    def updated(self) -> Iterator[Tensor]:
        """Return the tensors that training changes.

        These are the tensors in optimizers, or, if no optimizer was found, all that require gradients.
        """
        if self.optimizers:
            return self.optimized()
        parameters = (p for found in self.modules for p in found.value.parameters())
        tensors = (found.value for found in self.tensors if found.value.is_leaf)
        return (tensor for tensor in (*parameters, *tensors) if tensor.requires_grad)

    def optimized(self) -> Iterator[Tensor]:
        """Yield every tensor that an optimizer holds at this moment, each once, in the optimizers' order."""
        held = (parameter for found in self.optimizers for parameter in parameters_of(found.value))
        yield from {id(parameter): parameter for parameter in held}.values()

    def not_optimized(self) -> list[Tensor]:
        """Return each parameter and leaf tensor outside of optimizers once; a trainer may update these itself."""
        optimized = {id(tensor) for tensor in self.optimized()}
        parameters = (p for found in self.modules for p in found.value.parameters())
        tensors = (found.value for found in (*self.parameters, *self.tensors) if found.value.is_leaf)
        return list({id(t): t for t in (*parameters, *tensors) if id(t) not in optimized}.values())

    def current(self, found: Iterable[Found[Tensor]]) -> list[Found[Tensor]]:
        """Return each of `found` with the tensor that is at its path now, or unchanged if no tensor is there.

        A trainer may replace a tensor in a manual update, ``state["w"] = (state["w"] - rate *
        gradient).detach().requires_grad_()``, or in a ``load_state_dict`` that uses the tensors of its payload.
        """
        found = list(found)
        now = self.look_up(each.path for each in found)
        tensors = {path: value for path, value in now.items() if isinstance(value, Tensor)}
        return [Found(each.path, each.name, tensors.get(each.path, each.value)) for each in found]

    def look_up(self, paths: Iterable[str]) -> dict[str, Any]:
        """Return the objects that are now at `paths`, by path; paths that lead nowhere are omitted."""
        children: dict[str, dict[str, Any]] = {}
        found = {path: _look_up(path, dict(self.roots), children) for path in paths}
        return {path: value for path, value in found.items() if value is not None}

    def currently_trained(self) -> list[Found[Tensor]]:
        """Return the current leaf tensors that require gradients and belong to no module and no optimizer."""
        return [f for f in self.current(self.tensors) if f.value.requires_grad and f.value.is_leaf]


def _look_up(path: str, named: dict[str, Any], children: dict[str, dict[str, Any]]) -> Any:
    """Return the object at `path`, or None. `named` has the roots; `children` caches the objects below each object."""
    while path not in named:
        where = next((start for start in named if path.startswith((f"{start}.", f"{start}["))), None)
        if where is None:
            return None
        if where not in children:
            children[where] = {below_it.path: below_it.value for below_it in below(where, named[where])}
        named = children[where]
    return named[path]


def discover(
    state: Any, trainer: object = None, *, reserved: Iterable[str] = (), host: nn.Module | None = None
) -> Discovered:
    """Find the modules, optimizers, schedulers and scalers in `state` and on `trainer`.

    The search covers dicts, lists, tuples, sets, dataclasses, attrs classes, plain objects and the variables that
    functions close over, also in cycles. It skips objects of the classes for which `is_opaque` is true, such as
    Lightning's trainers and callbacks, and containers of more than `SEARCHED_ITEMS` items. It also skips a module that
    is completely on the meta device, which is a skeleton for ``torch.func.functional_call``: if the hosted module
    contained one meta tensor, Lightning's `ModelParallelStrategy` would call `to_empty` and `reset_parameters` on all
    submodules. A module with a parameter in an optimizer is not skipped.

    Args:
        state: The result of ``configure``.
        trainer: The trainer instance.
        reserved: Names that no found object may get, such as the attributes of the module that registers them.
        host: A module that hosts the trainer; the search skips it.

    Raises:
        ContractError: A set holds several modules or optimizers, which ranks would find in different orders.
    """
    aliases: list[Reference] = []
    found = list(walk_both(state, trainer, host=host, tensors=aliases))
    modules = _outermost([(path, uncompiled(value)) for path, value in found if isinstance(value, nn.Module)])
    optimizers = _of_kind(found, Optimizer)
    optimized = {id(p) for _, optimizer in optimizers for p in parameters_of(optimizer)}
    modules = [(path, module) for path, module in modules if not _is_skeleton(module, optimized)]
    tensors = _of_kind(found, Tensor)
    known = {id(p) for _, module in modules for p in module.parameters()}
    paths = {id(tensor): path for path, tensor in tensors}
    bare = [
        (paths.get(id(p), f'{path}.param_groups[{g}]["params"][{i}]'), p)
        for path, optimizer in optimizers
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if id(p) not in known
    ]
    bare_ids = {id(p) for _, p in bare}
    reserved = frozenset(reserved)
    return Discovered(
        modules=_with_names(modules, reserved),
        optimizers=_with_names(optimizers, reserved),
        schedulers=_with_names(_of_kind(found, LRScheduler), reserved),
        scalers=_with_names(_of_kind(found, GradScaler), reserved),
        parameters=_with_names(list({id(p): (path, p) for path, p in bare}.values()), reserved),
        tensors=_with_names([(path, t) for path, t in tensors if id(t) not in bare_ids | known], reserved),
        aliases=tuple(aliases),
        generators=tuple(
            Found(path, path, value)
            for path, value in [*found, *globals_of(type(trainer))]
            if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)  # has no state
        ),
        stateful=tuple(Found(path, path, value) for path, value in found if keeps_state(value)),
        roots=(("state", state), ("trainer", trainer)),
        layout=_layout(modules, optimizers),
    )


def globals_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the global variables of the modules that define a trainer class and its bases, with dotted names."""
    for name in dict.fromkeys(cls.__module__ for cls in kind.__mro__ if not is_opaque(cls)):
        yield from ((f"{name}.{key}", value) for key, value in vars(sys.modules.get(name, object)).items())


def _layout(
    modules: Iterable[tuple[str, nn.Module]], optimizers: Iterable[tuple[str, Optimizer]]
) -> Mapping[str, tuple[int, ...] | None]:
    """See `Discovered.layout`."""
    shapes = {
        f"{path}.{name}": None if isinstance(parameter, UninitializedParameter) else tuple(parameter.shape)
        for path, module in modules
        # Keep every name of a shared parameter: if a step ties two, neither name may vanish from the layout.
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    sizes = {path: tuple(len(group["params"]) for group in each.param_groups) for path, each in optimizers}
    return {**shapes, **{f"{path}.param_groups": size for path, size in sizes.items()}}


def check_devices(discovered: Discovered, device: torch.device | str, *, world_size: int = 1) -> None:
    """Refuse objects that this rank cannot train.

    Raises:
        ContractError: A module or tensor is on a kind of device that is neither the run's nor the CPU, on the device of
            another rank, on the meta device (without values), or in memory that is shared with another process. Or a
            tensor outside of modules is a view of a module's parameter, and genlight is going to move that module.
            Names each path.
    """
    device = torch.device(device)
    if device.type != "cpu":
        _check_no_view_is_left_behind(discovered, device)
    moved: list[Found[Any]] = [*discovered.modules, *discovered.parameters]
    faults = [_fault(found, device, moved=True, world_size=world_size) for found in moved]
    faults += [_fault(found, device, moved=False, world_size=world_size) for found in discovered.tensors]
    faults = [fault for fault in faults if fault]
    if faults:
        raise ContractError(
            "This rank cannot train the trainer's state: "
            + "; ".join(faults)
            + ". Build it in `configure` on `ctx.device` (or on the CPU; genlight moves modules)."
        )


def check_unchanged(
    before: Discovered, state: Any, trainer: object = None, *, host: nn.Module | None = None
) -> Discovered:
    """Refuse modules and optimizers that a step built, and layers and groups that it added, removed or resized.

    A resume calls `configure` again, which builds only the original objects, so a later checkpoint would not fit them.

    Returns:
        The trainer's objects now.

    Raises:
        ContractError: Names the path of each module, optimizer, parameter or group, and the way out.
    """
    now = discover(state, trainer, host=host)
    known = {id(m) for found in before.modules for m in found.value.modules()}
    known |= {id(found.value) for found in before.optimizers}
    objects: list[Found[Any]] = [*now.modules, *now.optimizers]
    new = [found.path for found in objects if id(found.value) not in known]
    if new:
        raise ContractError(
            f"{', '.join(new)} appeared after `configure`, so neither checkpoints nor the strategy include it. Build "
            "every module and optimizer in `configure`."
        )
    had = before.layout
    has = _layout(
        ((found.path, found.value) for found in before.modules),
        ((found.path, found.value) for found in before.optimizers),
    )
    faults = [
        f"{path} was {had.get(path, 'absent')} after `configure` and is {has.get(path, 'gone')}"
        for path in dict.fromkeys([*had, *has])
        if path not in had or (had[path] is not None and had[path] != has.get(path))
    ]
    if faults:
        raise ContractError(
            f"A run whose layers change while training cannot be resumed: {list_first(faults, _NAMED_AT_MOST, '; ')}. "
            "Build all layers in `configure`, at their final size, and give the optimizer all groups there; it skips "
            "parameters that do not require a gradient yet."
        )
    return now


def walk_both(
    state: Any, trainer: object, *, host: nn.Module | None = None, tensors: list[Reference] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield everything that can be reached from a trainer's state and from the trainer.

    `host` is as in `discover`, `tensors` as in `walk`.

    The state may refer to the trainer, for example by a bound method. Such references are not followed, so that paths
    of the trainer's objects begin with ``trainer``.
    """
    seen: dict[int, Any] = {id(host): host}
    yield from walk(state, "state", seen=seen, without=trainer, tensors=tensors)
    yield from walk(trainer, "trainer", seen=seen, tensors=tensors)


def walk(
    root: Any,
    path: str,
    *,
    seen: dict[int, Any] | None = None,
    without: object = None,
    tensors: list[Reference] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield everything that can be reached from `root`, including plain values, with paths, depth first.

    Children come in the order of their container or attributes, and items of a set in a fixed order.

    Args:
        root: The object at which the walk begins.
        path: The name of `root`, with which all paths begin.
        seen: Objects to skip, by id. The walk adds each object that it visits, so that several walks can share a dict.
        without: One more object to skip; unlike those in `seen`, a later walk may visit it.
        tensors: A list to which every reference to a tensor is added, also to tensors that were visited before.
    """
    seen = {} if seen is None else seen  # has the objects as values, because the id of a freed one could be used again
    # A stack instead of recursion, so that a linked list of a thousand nodes does not end in a RecursionError.
    stack = [(path, root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, ATOMS) and getattr(value, "__closure__", None) is None:
            yield path, value
        elif id(value) not in seen and value is not without:
            seen[id(value)] = value
            yield path, value
            if isinstance(value, nn.Module):
                seen.setdefault(id(uncompiled(value)), uncompiled(value))
            references = list(below(path, value))
            if tensors is not None:
                tensors += [reference for reference in references if isinstance(reference.value, Tensor)]
            stack.extend((each.path, each.value) for each in reversed(references) if not each.is_key)


def _of_kind(found: list[tuple[str, Any]], kind: type[T]) -> list[tuple[str, T]]:
    return [(path, value) for path, value in found if isinstance(value, kind)]


def _outermost(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    unique = list({id(module): (path, module) for path, module in reversed(modules)}.values())[::-1]
    inner = {id(sub) for _, module in unique for sub in module.modules() if sub is not module}
    return [(path, module) for path, module in unique if id(module) not in inner]


def _with_names(found: list[tuple[str, T]], reserved: frozenset[str]) -> tuple[Found[T], ...]:
    """Give each object a valid attribute name that is unique and not reserved."""
    names: dict[str, None] = {}
    for path, _ in found:
        name = _name(path)
        if name in names and path.startswith("trainer"):
            name = f"trainer_{name}"
        base, n = name, 2
        while name in names or name in reserved:
            name, n = f"{base}_{n}", n + 1
        names[name] = None
    return tuple(Found(path, name, value) for (path, value), name in zip(found, names, strict=True))


def _name(path: str) -> str:
    """Return ``nets_generator`` for ``state["nets"].generator``, and the name of the root itself for a root."""
    root = re.split(r"[.\[]", path, maxsplit=1)[0]
    words = [w for w in re.split(r"[^0-9A-Za-z]+", path[len(root) :]) if w]
    name = "_".join(words) or root
    return name if not name[0].isdigit() else f"{root}_{name}"


def _tensors_of(found: Found[Any]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(found.value, Tensor):
        yield found.path, found.value
        return
    for name, tensor in (*found.value.named_parameters(), *found.value.named_buffers()):
        yield f"{found.path}.{name}", tensor


def _fault(found: Found[Any], device: torch.device, *, moved: bool, world_size: int) -> str:
    """Return the reason why this rank cannot train `found`, or an empty text; `moved` is True if genlight moves it."""
    for path, tensor in _tensors_of(found):
        if tensor.is_meta and moved:
            return f"{path} has no values, because it is on the meta device; call to_empty and load its weights"
        if not _usable(tensor, device, moved=moved):
            return f"{path} is on {tensor.device}, but this rank runs on {device}"
        if world_size > 1 and tensor.requires_grad and _in_shared_memory(tensor):
            return f"{path} is in memory that is shared with another process"
    return ""


def _check_no_view_is_left_behind(discovered: Discovered, device: torch.device) -> None:
    """Refuse tensors outside of modules that share memory with a parameter that genlight is about to move."""
    outside = {
        memory: (path, tensor)
        for found in (*discovered.parameters, *discovered.tensors)
        for memory, path, tensor in _on_host(found.path, found.value)
    }
    for module in discovered.modules:
        for name, parameter in module.value.named_parameters():
            for memory, path, tensor in _on_host(f"{module.path}.{name}", parameter):
                other, whole = outside.get(memory, ("", tensor))
                if whole is not tensor:
                    raise ContractError(
                        f"{other} and {path} are views of the same memory on the host. genlight moves the module to "
                        f"{device}, and they would become two separate tensors. In `configure`, move the module to "
                        "`ctx.device` before you make such a view."
                    )


def _on_host(path: str, tensor: Tensor) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the host memory addresses of a tensor and of its gradient, with their paths.

    Tensors on other devices, sparse tensors and subclasses of `Tensor`, such as shards, are skipped.
    """
    gradient = tensor.grad if tensor.is_leaf else None
    for where, each in ((path, tensor), (f"{path}.grad", gradient)):
        if each is None or type(each) not in (Tensor, nn.Parameter) or each.layout is not torch.strided:
            continue
        if each.device.type == "cpu" and each.numel() > 0:
            yield each.untyped_storage().data_ptr(), where, each


def _is_skeleton(module: nn.Module, optimized: Collection[int]) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(t.is_meta and id(t) not in optimized for t in tensors)


def _in_shared_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _usable(tensor: Tensor, device: torch.device, *, moved: bool) -> bool:
    if tensor.device.type in ("cpu", "meta"):
        return True
    if tensor.device.type != device.type:
        return False
    # If genlight moves the tensor, any device of this kind will do. If not, it must already be on this rank's device.
    return moved or str(device) in (device.type, str(tensor.device))
