"""Finds what a trainer class built: its modules, optimizers, schedulers and scalers, wherever it put them.

A trainer keeps them in its `state`, of any shape, or on itself. Everything that Lightning has to know about (device
moves, checkpoints, gradient sync, sharding) starts from what is found here, and every rank finds the same things in
the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..contract.exceptions import ContractError
from ..contract.types import StepContext
from .parameter_aliases import Alias, aliases, key_text

__all__ = ["Discovered", "Found", "check_devices", "check_nothing_new", "discover", "uncompiled", "walk"]

T = TypeVar("T")

SEARCHED_ITEMS = 10_000
"""A container with more items than this is data, such as a replay buffer, and is not searched."""

_ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)
_TORCH_INTERNALS = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}
_DATA_LIBRARIES = frozenset({"numpy", "pyarrow", "pandas"})
_TORCH_WITHOUT_USERS_OBJECTS = ("torch._", "torch.utils.data")
_HOSTS = ("lightning.pytorch.", "pytorch_lightning.")
"""Whose objects, callbacks and data modules of users included, lead to the run that hosts the trainer class."""
_KEPT_ON_CLASSES = (nn.Module, Optimizer, LRScheduler, GradScaler, dict, list)
_CONTAINERS = (list, tuple, deque, set, frozenset)


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
    """What a trainer built, each object once, in an order that is equal on all ranks."""

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
    aliases: tuple[Alias, ...] = ()
    """Places where the trainer keeps tensors by themselves, in a list say, parameters of found modules included."""

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
        """What training changes: the optimizers' tensors, or, of a trainer without any, all that wants a gradient."""
        if self.optimizers:
            return self.optimized()
        parameters = (p for found in self.modules for p in found.value.parameters())
        tensors = (found.value for found in self.tensors if found.value.is_leaf)
        return (tensor for tensor in (*parameters, *tensors) if tensor.requires_grad)

    def optimized(self) -> Iterator[Tensor]:
        """Every tensor that an optimizer holds at this moment, each once, in the optimizers' order."""
        seen: set[int] = set()
        for found in self.optimizers:
            for group in found.value.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield parameter

    def not_optimized(self) -> list[Tensor]:
        """What a trainer may update itself, beside its optimizers: parameters and leaf tensors, each once."""
        optimized = {id(tensor) for tensor in self.optimized()}
        parameters = (p for found in self.modules for p in found.value.parameters())
        tensors = (found.value for found in (*self.parameters, *self.tensors) if found.value.is_leaf)
        return list({id(t): t for t in (*parameters, *tensors) if id(t) not in optimized}.values())


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
    seen: dict[int, Any] = {id(host): host}
    # A bound method or a back reference in the state leads to the trainer; what is there is named after the trainer.
    found = [*walk(state, "state", seen=seen, without=trainer), *walk(trainer, "trainer", seen=seen)]
    modules = _outermost([(path, uncompiled(value)) for path, value in found if isinstance(value, nn.Module)])
    optimizers = _of(found, Optimizer)
    optimized = {id(p) for _, optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
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
        aliases=tuple(aliases(found, known | paths.keys())),
    )


def check_devices(discovered: Discovered, device: torch.device | str, *, world_size: int = 1) -> None:
    """Refuse what this rank cannot train, each by its path.

    Raises:
        ContractError: A module or tensor is on another kind of device than the run, or on another rank's device, or
            has no values, on the meta device, or its memory is shared with another process.
    """
    device = torch.device(device)
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


def check_nothing_new(before: Discovered, state: Any, trainer: object = None, *, host: nn.Module | None = None) -> None:
    """Refuse a module or optimizer that ``train_step`` built and kept, which no checkpoint or strategy knows.

    Raises:
        ContractError: Names the path of each.
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


def walk(
    root: Any, path: str, *, seen: dict[int, Any] | None = None, without: object = None
) -> Iterator[tuple[str, Any]]:
    """Everything that can be reached from `root`, with its path, in the order in which it was built; plain values too.

    Args:
        root: Where to begin.
        path: Its name.
        seen: Objects that are not visited again; pass one dict to several walks.
        without: An object that is not entered.
    """
    seen = {} if seen is None else seen  # keeps what it names alive, or an id could come back for another object
    # An explicit stack: a linked list of a thousand nodes must not end in a RecursionError.
    stack = [(path, root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, _ATOMS) and getattr(value, "__closure__", None) is None:
            yield path, value
        elif id(value) not in seen and value is not without:
            seen[id(value)] = value
            yield path, value
            stack.extend(reversed(list(_below(path, value, seen))))


def _below(path: str, value: Any, seen: dict[int, Any]) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Tensor | Optimizer | GradScaler):
        return ()
    if isinstance(value, nn.Module):
        original = uncompiled(value)
        seen.setdefault(id(original), original)
        return _attributes_of_module(path, original)
    if isinstance(value, LRScheduler):
        return ((f"{path}.optimizer", value.optimizer),)
    return _children(path, value)


def _children(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return ((f"{path}[{key_text(k)}]", v) for k, v in value.items()) if len(value) <= SEARCHED_ITEMS else ()
    if isinstance(value, _CONTAINERS):
        if len(value) > SEARCHED_ITEMS:
            return ()
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ((f"{path}.{name}", getattr(value, name)) for name in value._fields)
        items = _in_fixed_order(path, value) if isinstance(value, set | frozenset) else value
        return ((f"{path}[{i}]", item) for i, item in enumerate(items))
    if isinstance(value, functools.partial):
        return ((f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
    if isinstance(value, types.FunctionType):
        return _closed_over(path, value)
    if isinstance(value, types.MethodType):
        return ((f"{path}.__self__", value.__self__),)
    if _is_opaque(type(value)):
        return ()
    attributes = ((f"{path}.{name}", child) for name, child in _attributes(value))
    if isinstance(value, StepContext):  # which a trainer may keep: what feeds it is not part of what it built
        return ((name, child) for name, child in attributes if child is not value.dataset)
    return attributes


def _is_opaque(cls: type) -> bool:
    """Whether a class is of no interest: of the standard library, of numpy, of torch's data loading, or of the host."""
    if any(base.__module__.startswith(_HOSTS) for base in cls.__mro__):
        return True
    if cls is types.SimpleNamespace or dataclasses.is_dataclass(cls):
        return False
    module = cls.__module__
    top = module.partition(".")[0]
    if top == "__main__":
        return False
    return top in sys.stdlib_module_names | _DATA_LIBRARIES or module.startswith(_TORCH_WITHOUT_USERS_OBJECTS)


def _closed_over(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield f"{path}.<closure>.{name}", cell.cell_contents


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    # No property is called: it may compute, print or fail.
    own = dict(getattr(value, "__dict__", {}))
    yield from own.items()
    for cls in type(value).__mro__:
        yield from ((n, v) for n, v in vars(cls).items() if isinstance(v, _KEPT_ON_CLASSES) and n not in own)
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _attributes_of_module(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the module and its submodules keep beside parameters, buffers and submodules, such as an optimizer."""
    for name, submodule in module.named_modules():
        where = f"{path}.{name}" if name else path
        is_torchs = type(submodule).__module__.startswith("torch.")
        for attribute, value in vars(submodule).items():
            private = is_torchs and attribute.startswith("_")
            if not private and attribute not in _TORCH_INTERNALS and not isinstance(value, Tensor):
                yield f"{where}.{attribute}", value


def _of(found: list[tuple[str, Any]], kind: type[T]) -> list[tuple[str, T]]:
    return [(path, value) for path, value in found if isinstance(value, kind)]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that a compiled one was made from, else the module itself."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _outermost(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    unique = list({id(module): (path, module) for path, module in reversed(modules)}.values())[::-1]
    inner = {id(sub) for _, module in unique for sub in module.modules() if sub is not module}
    return [(path, module) for path, module in unique if id(module) not in inner]


def _in_fixed_order(path: str, items: set[Any] | frozenset[Any]) -> list[Any]:
    """The items of a set in an order that does not depend on addresses, which differ from rank to rank."""
    ordered = sorted(items, key=_fingerprint)
    for a, b in itertools.pairwise(ordered):
        if _fingerprint(a) == _fingerprint(b) and not isinstance(a, _ATOMS):
            raise ContractError(
                f"{path} is a set with two {type(a).__name__} which nothing tells apart, so that ranks could not "
                "agree on them. Use a list."
            )
    return ordered


def _fingerprint(item: Any) -> str:
    if isinstance(item, nn.Module):
        return f"{type(item).__qualname__} {[(n, tuple(p.shape)) for n, p in item.named_parameters()]}"
    if isinstance(item, Tensor):
        return f"Tensor {tuple(item.shape)} {item.dtype}"
    return f"{type(item).__qualname__} {item!r}" if isinstance(item, _ATOMS) else type(item).__qualname__


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
