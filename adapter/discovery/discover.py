"""Finds what a trainer class built: its modules, optimizers, schedulers and scalers, wherever it put them.

A trainer keeps them in its `state`, of any shape, or on itself. Everything that Lightning has to know about (device
moves, checkpoints, gradient sync, sharding) starts from what is found here, and every rank finds the same things in
the same order.
"""

from __future__ import annotations

import functools
import random
import re
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
from .children import ATOMS, GENERATORS, Reference, below, uncompiled

__all__ = ["Discovered", "Found", "check_devices", "check_unchanged", "discover", "walk", "walk_both"]

T = TypeVar("T")

_NAMED_AT_MOST = 6


@dataclass(frozen=True)
class Found(Generic[T]):
    """One object and where it was found."""

    path: str
    """As the trainer's author would write it: ``state["nets"].generator`` or ``trainer.net``."""
    name: str
    """A valid attribute name, unique among the objects of its kind and equal on all ranks."""
    value: T


@dataclass(frozen=True)
class Discovered:
    """The objects that a trainer built, each once, in an order that is equal on all ranks."""

    modules: tuple[Found[nn.Module], ...] = ()
    """Outermost modules; a compiled module is given as the module that it was compiled from."""
    optimizers: tuple[Found[Optimizer], ...] = ()
    schedulers: tuple[Found[LRScheduler], ...] = ()
    scalers: tuple[Found[GradScaler], ...] = ()
    """Gradient scalers of the trainer's own."""
    parameters: tuple[Found[Tensor], ...] = ()
    """Tensors that an optimizer holds and no found module does."""
    tensors: tuple[Found[Tensor], ...] = ()
    """Other tensors, in `state` or on the trainer, outside of modules."""
    aliases: tuple[Reference, ...] = ()
    """Where the trainer keeps tensors by themselves, in a list say, parameters of found modules included."""
    generators: tuple[Found[Any], ...] = ()
    """Generators of random numbers, of torch, NumPy and Python."""
    roots: tuple[tuple[str, Any], ...] = ()
    """The roots of the search, the state and the trainer, by the names that paths begin with."""
    layout: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    """By path the shapes of the modules' parameters as they were found, None of a lazy one, which gets its shape later;
    and of each optimizer how many parameters its groups had."""

    @functools.cached_property
    def trained(self) -> tuple[Found[nn.Module], ...]:
        """The modules of which some optimizer holds a parameter."""
        held = {id(p) for p in self.optimized()}
        return tuple(m for m in self.modules if any(id(p) in held for p in m.value.parameters()))

    @functools.cached_property
    def untrained(self) -> tuple[Found[nn.Module], ...]:
        """EMA copies, frozen teachers, metrics: the modules that no optimizer knows."""
        trained = {m.name for m in self.trained}
        return tuple(m for m in self.modules if m.name not in trained)

    def updated(self) -> Iterator[Tensor]:
        """Tensors that training changes: the optimizers', or, of a trainer without any, all that require gradients."""
        if self.optimizers:
            return self.optimized()
        parameters = (p for found in self.modules for p in found.value.parameters())
        tensors = (found.value for found in self.tensors if found.value.is_leaf)
        return (tensor for tensor in (*parameters, *tensors) if tensor.requires_grad)

    def optimized(self) -> Iterator[Tensor]:
        """Every tensor that an optimizer holds at this moment, each once, in the optimizers' order."""
        held = (parameter for found in self.optimizers for parameter in parameters_of(found.value))
        yield from {id(parameter): parameter for parameter in held}.values()

    def not_optimized(self) -> list[Tensor]:
        """Parameters and leaf tensors, each once, that a trainer may update itself, outside of its optimizers."""
        optimized = {id(tensor) for tensor in self.optimized()}
        parameters = (p for found in self.modules for p in found.value.parameters())
        tensors = (found.value for found in (*self.parameters, *self.tensors) if found.value.is_leaf)
        return list({id(t): t for t in (*parameters, *tensors) if id(t) not in optimized}.values())

    def current(self, found: Iterable[Found[Tensor]]) -> list[Found[Tensor]]:
        """Each of `found` with the tensor that is kept in its place now; where there is none, as it was found.

        A trainer may put another one there: by an update by hand, ``state["w"] = (state["w"] - rate *
        gradient).detach().requires_grad_()``, or in a ``load_state_dict`` that takes the tensors of its payload.
        """
        found = list(found)
        now = self.look_up(each.path for each in found)
        tensors = {path: value for path, value in now.items() if isinstance(value, Tensor)}
        return [Found(each.path, each.name, tensors.get(each.path, each.value)) for each in found]

    def look_up(self, paths: Iterable[str]) -> dict[str, Any]:
        """The objects that are at `paths` now, without those at which there is none."""
        children: dict[str, dict[str, Any]] = {}
        found = {path: _look_up(path, dict(self.roots), children) for path in paths}
        return {path: value for path, value in found.items() if value is not None}

    def currently_trained(self) -> list[Found[Tensor]]:
        """The bare tensors of no optimizer that want a gradient, as they are now."""
        return [f for f in self.current(self.tensors) if f.value.requires_grad and f.value.is_leaf]


def _look_up(path: str, named: dict[str, Any], children: dict[str, dict[str, Any]]) -> Any:
    """The object at `path`, below one of the objects that are `named` by its beginning; None where there is none."""
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

    Dicts, lists, tuples, sets, dataclasses, attrs classes, plain objects and the variables that functions close over
    are searched, cycles and all; classes of the standard library, Lightning's trainers and callbacks, and containers of
    more than `SEARCHED_ITEMS` items are not. A module that has no values, all of it on the meta device, is left out: it
    is a skeleton for ``torch.func.functional_call``, and Lightning would give it, and all others, new weights.

    Args:
        state: What ``configure`` returned.
        trainer: The trainer instance.
        reserved: Names that no found object may get, such as the attributes of the module that registers them.
        host: A module that hosts the trainer, and is not part of what it built.

    Raises:
        ContractError: A set holds modules or optimizers that nothing tells apart, so ranks could not agree on them.
    """
    aliases: list[Reference] = []
    found = list(walk_both(state, trainer, host=host, tensors=aliases))
    modules = _outermost([(path, uncompiled(value)) for path, value in found if isinstance(value, nn.Module)])
    optimizers = _of(found, Optimizer)
    optimized = {id(p) for _, optimizer in optimizers for p in parameters_of(optimizer)}
    modules = [(path, module) for path, module in modules if not _is_skeleton(module, optimized)]
    tensors = _of(found, Tensor)
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
        modules=_named(modules, reserved),
        optimizers=_named(optimizers, reserved),
        schedulers=_named(_of(found, LRScheduler), reserved),
        scalers=_named(_of(found, GradScaler), reserved),
        parameters=_named(list({id(p): (path, p) for path, p in bare}.values()), reserved),
        tensors=_named([(path, t) for path, t in tensors if id(t) not in bare_ids | known], reserved),
        aliases=tuple(aliases),
        generators=tuple(
            Found(path, path, value)
            for path, value in found
            if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)  # which has no state
        ),
        roots=(("state", state), ("trainer", trainer)),
        layout=_layout(modules, optimizers),
    )


def _layout(
    modules: Iterable[tuple[str, nn.Module]], optimizers: Iterable[tuple[str, Optimizer]]
) -> Mapping[str, tuple[int, ...] | None]:
    """See `Discovered.layout`."""
    shapes = {
        f"{path}.{name}": None if isinstance(parameter, UninitializedParameter) else tuple(parameter.shape)
        for path, module in modules
        for name, parameter in module.named_parameters(remove_duplicate=False)  # which may be tied later
    }
    sizes = {path: tuple(len(group["params"]) for group in each.param_groups) for path, each in optimizers}
    return {**shapes, **{f"{path}.param_groups": size for path, size in sizes.items()}}


def check_devices(discovered: Discovered, device: torch.device | str, *, world_size: int = 1) -> None:
    """Refuse what this rank cannot train, each by its path.

    Raises:
        ContractError: A module or tensor is on another kind of device than the run, or on another rank's device, or
            has no values, on the meta device, or its memory is shared with another process. Or a tensor outside of a
            module is made of the memory of the module's parameters, which will be elsewhere once they are moved.
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
            "The trainer's state does not belong on this rank: "
            + "; ".join(faults)
            + ". Build it in `configure` on `ctx.device` (or on the CPU; genlight moves modules)."
        )


def check_unchanged(
    before: Discovered, state: Any, trainer: object = None, *, host: nn.Module | None = None
) -> Discovered:
    """Refuse what ``train_step`` built, added, removed or resized: the next start would build it as `configure` does.

    Returns:
        What the trainer has now.

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
            f"{', '.join(new)} appeared after `configure`, so it is neither in checkpoints nor known to the strategy. "
            "Build every module and optimizer in `configure`."
        )
    had = before.layout
    has = _layout(
        ((found.path, found.value) for found in before.modules),
        ((found.path, found.value) for found in before.optimizers),
    )
    faults = [
        f"{path} was {had.get(path, 'not there')} after `configure` and is {has.get(path, 'gone')}"
        for path in dict.fromkeys([*had, *has])
        if path not in had or (had[path] is not None and had[path] != has.get(path))
    ]
    if faults:
        more = f" and {len(faults) - _NAMED_AT_MOST} more" if len(faults) > _NAMED_AT_MOST else ""
        raise ContractError(
            f"Layers that change while training cannot be resumed: {'; '.join(faults[:_NAMED_AT_MOST])}{more}. Build "
            "all layers in `configure`, at their final size, and give the optimizer all groups there: parameters "
            "that do not require a gradient yet are left alone."
        )
    return now


def walk_both(
    state: Any, trainer: object, *, host: nn.Module | None = None, tensors: list[Reference] | None = None
) -> Iterator[tuple[str, Any]]:
    """Everything that can be reached from a trainer's state and from itself; the arguments are those of `discover`.

    A bound method or a back reference in the state leads to the trainer; what is there is named after the trainer.
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
    """Everything that can be reached from `root`, with its path, in the order in which it was built; plain values too.

    Args:
        root: Where to begin.
        path: Its name.
        seen: Objects that are not visited again; pass one dict to several walks.
        without: An object that is not entered.
        tensors: Gets every reference to a tensor, also where it was visited before.
    """
    seen = {} if seen is None else seen  # keeps what it names alive, or an id could come back for another object
    # An explicit stack: a linked list of a thousand nodes must not end in a RecursionError.
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


def _of(found: list[tuple[str, Any]], kind: type[T]) -> list[tuple[str, T]]:
    return [(path, value) for path, value in found if isinstance(value, kind)]


def _outermost(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    unique = list({id(module): (path, module) for path, module in reversed(modules)}.values())[::-1]
    inner = {id(sub) for _, module in unique for sub in module.modules() if sub is not module}
    return [(path, module) for path, module in unique if id(module) not in inner]


def _named(found: list[tuple[str, T]], reserved: frozenset[str]) -> tuple[Found[T], ...]:
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
    """``state["nets"].generator`` is ``nets_generator``; a root that is itself the object keeps its own name."""
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
    for path, tensor in _tensors_of(found):
        if tensor.is_meta and moved:
            return f"{path} has no values, being on the meta device: give it some (to_empty and its weights)"
        if not _usable(tensor, device, moved=moved):
            return f"{path} is on {tensor.device}, but this rank runs on {device}"
        if world_size > 1 and tensor.requires_grad and _in_shared_memory(tensor):
            return f"{path} is in memory that is shared with another process"
    return ""


def _check_no_view_is_left_behind(discovered: Discovered, device: torch.device) -> None:
    """Refuse tensors that have their memory in common with what is about to move without them."""
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
                        f"{device}, and they would be two tensors there. In `configure`, move the module to "
                        "`ctx.device` before such a view is made."
                    )


def _on_host(path: str, tensor: Tensor) -> Iterator[tuple[int, str, Tensor]]:
    """Where the plain memory of a tensor and of its gradient begins on the host, with the path of each.

    Parts of a sharded tensor, quantised ones and such have none.
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
    # A tensor that genlight does not move must be on this rank's own device already.
    return moved or str(device) in (device.type, str(tensor.device))
