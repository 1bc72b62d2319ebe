"""The children of an object: items, attributes, and variables that a function closes over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..contract.exceptions import ContractError
from ..contract.types import StepContext
from ..plumbing.counted_dict import CountedDict
from ..plumbing.generators import GENERATORS
from ..plumbing.text import key_text

SEARCHED_ITEMS = 10_000
"""A container with more items than this is data, such as a replay buffer, and is not searched."""
ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)
"""Types without children, except for functions that close over variables."""

_TORCH_INTERNALS = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}
_DATA_LIBRARIES = frozenset({"numpy", "pyarrow", "pandas"})
_TORCH_WITHOUT_USER_OBJECTS = ("torch._", "torch.utils.data")
_HOSTS = ("lightning.pytorch.", "pytorch_lightning.", "genlight.adapter.module.")
"""Prefixes of modules. Objects of their classes and of users' subclasses, such as callbacks, refer back to the run, so
`is_opaque` is true for them."""
_KEPT_ON_CLASSES = (nn.Module, Optimizer, LRScheduler, GradScaler, *GENERATORS, dict, list)
"""Types of class attributes that are searched; other class attributes are methods or constants."""
_CONTAINERS = (list, tuple, deque, set, frozenset)
_HASHES_OF_ADDRESSES: tuple[Any, ...] = (object.__hash__, Tensor.__hash__)


class Reference(NamedTuple):
    """An object, and the place in its parent that leads to it."""

    path: str
    """The path as the author of the trainer class would write it."""
    value: Any
    put: Callable[[Any], None] | None = None
    """Replaces the object; None if that is impossible, as in a tuple."""
    is_key: bool = False
    """Whether `value` is a key of a mapping, such as a parameter in a dict from parameters to their averages."""


def below(path: str, value: Any) -> Iterable[Reference]:
    """Return the children of `value`, with paths that begin with `path`."""
    if isinstance(value, Tensor | Optimizer | GradScaler):
        return ()
    if isinstance(value, nn.Module):
        return _attributes_of_module(path, uncompiled(value))
    if isinstance(value, LRScheduler):
        return (Reference(f"{path}.optimizer", value.optimizer),)
    return _children(path, value)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `module` was compiled from, or `module` itself if it is not compiled."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _children(path: str, value: Any) -> Iterable[Reference]:
    """Return the children of an object that is neither a tensor, an optimizer, a module nor a scheduler."""
    if isinstance(value, CountedDict):  # a search would count a job's hyperparameters as read
        return ()
    if isinstance(value, Mapping):
        return _items(path, value) if len(value) <= SEARCHED_ITEMS else ()
    if isinstance(value, _CONTAINERS):
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        if kind.__len__(value) > SEARCHED_ITEMS:  # the `__len__` of a subclass may return another number, or raise
            return ()
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return (Reference(f"{path}.{name}", getattr(value, name)) for name in value._fields)
        if isinstance(value, list | deque):
            put = functools.partial(functools.partial, value.__setitem__)
            return (Reference(f"{path}[{i}]", item, put(i)) for i, item in enumerate(value))
        items = _in_fixed_order(path, value) if isinstance(value, set | frozenset) else value
        return (Reference(f"{path}[{i}]", item) for i, item in enumerate(items))
    if isinstance(value, functools.partial):
        return [Reference(f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords")]
    if isinstance(value, types.FunctionType):
        return _closure_variables(path, value)
    if isinstance(value, types.MethodType):
        return (Reference(f"{path}.__self__", value.__self__),)
    if is_opaque(type(value)):
        return ()
    attributes = _attributes(path, value)
    if isinstance(value, StepContext):  # a trainer may keep it, but its dataset is not part of the trainer
        return (reference for reference in attributes if reference.value is not value.dataset)
    return attributes


def _items(path: str, mapping: Mapping[Any, Any]) -> Iterator[Reference]:
    """Yield the values of a mapping, and the keys that are tensors."""
    changeable = mapping if isinstance(mapping, MutableMapping) else None
    for key, value in mapping.items():
        put = None if changeable is None else functools.partial(changeable.__setitem__, key)
        yield Reference(f"{path}[{key_text(key)}]", value, put)
        if isinstance(key, Tensor):
            rekey = None if changeable is None else functools.partial(_rekey, changeable, key)
            yield Reference(f"a key of {path}", key, rekey, is_key=True)


def _rekey(mapping: MutableMapping[Any, Any], old: Any, new: Any) -> None:
    """Replace the key `old`, at the same place in the order."""
    items = [(new if key is old else key, value) for key, value in mapping.items()]
    mapping.clear()
    mapping.update(items)


def keeps_state(value: Any) -> bool:
    """Whether `value` has ``state_dict()`` and ``load_state_dict(state)``, and no other part of a checkpoint saves it.

    Modules, optimizers, schedulers and scalers do not count, because other parts of a checkpoint hold them. Neither do
    objects with ``__iter__``: they may be data loaders, whose position is saved separately.
    """
    kind = type(value)
    if not hasattr(kind, "state_dict") or isinstance(value, _KEPT_ON_CLASSES) or hasattr(kind, "__iter__"):
        return False
    try:  # a trainer class also has these methods, but with more arguments
        inspect.signature(value.state_dict).bind()
        inspect.signature(value.load_state_dict).bind({})
    except (AttributeError, TypeError, ValueError):
        return False
    return not isinstance(value, type) and not is_opaque(kind)


def is_opaque(cls: type) -> bool:
    """Whether to skip objects of `cls`, because they hold nothing of the trainer's or refer back to the run.

    Such classes are defined in the standard library, in `_DATA_LIBRARIES` or in `_TORCH_WITHOUT_USER_OBJECTS`, or have
    a base in `_HOSTS`.
    """
    if any(base.__module__.startswith(_HOSTS) for base in cls.__mro__):
        return True
    if cls is types.SimpleNamespace or dataclasses.is_dataclass(cls):
        return False
    module = cls.__module__
    top = module.partition(".")[0]
    if top == "__main__":
        return False
    return top in sys.stdlib_module_names | _DATA_LIBRARIES or module.startswith(_TORCH_WITHOUT_USER_OBJECTS)


def _closure_variables(path: str, function: types.FunctionType) -> Iterator[Reference]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            put = functools.partial(setattr, cell, "cell_contents")
            yield Reference(f"{path}.<closure>.{name}", cell.cell_contents, put)


def _attributes(path: str, value: Any) -> Iterator[Reference]:
    def reference(name: str, attribute: Any) -> Reference:
        # Bypass the `__setattr__` of a frozen dataclass.
        return Reference(f"{path}.{name}", attribute, functools.partial(object.__setattr__, value, name))

    # Properties are skipped, because calling one may compute, print or fail.
    own = dict(getattr(value, "__dict__", {}))
    yield from itertools.starmap(reference, own.items())
    for cls in type(value).__mro__:
        kept = ((n, v) for n, v in vars(cls).items() if isinstance(v, _KEPT_ON_CLASSES) and n not in own)
        yield from itertools.starmap(reference, kept)
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield reference(name, getattr(value, name))


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module by name, without its submodules and without those that every module has."""
    is_torchs = type(module).__module__.startswith("torch.")
    for name, value in vars(module).items():
        if name not in _TORCH_INTERNALS and not (is_torchs and name.startswith("_")):
            yield name, value


def _attributes_of_module(path: str, module: nn.Module) -> Iterator[Reference]:
    """Yield the attributes of a module and of its submodules, except for tensors and submodules."""
    for name, submodule in module.named_modules():
        where = f"{path}.{name}" if name else path
        for attribute, value in attributes_of(submodule):
            if not isinstance(value, Tensor):
                yield Reference(f"{where}.{attribute}", value, functools.partial(setattr, submodule, attribute))


def _in_fixed_order(path: str, items: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the items of a set in an order that does not depend on their addresses, which differ between ranks."""
    objects = [item for item in items if not isinstance(item, ATOMS) or getattr(item, "__closure__", None) is not None]
    by_address = [item for item in objects if type(item).__hash__ in _HASHES_OF_ADDRESSES]
    if len(by_address) > 1:
        raise ContractError(
            f"{path} is a set with {len(by_address)} objects, such as a {type(by_address[0]).__name__}, which each "
            "rank would find in another order. Use a list."
        )
    return [*sorted(items.difference(by_address), key=repr), *by_address]
