"""What an object leads to by one step: items, attributes, variables that a function closes over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..contract.exceptions import ContractError
from ..contract.types import StepContext
from ..plumbing.counted_dict import CountedDict
from .parameter_aliases import key_text

__all__ = ["ATOMS", "GENERATORS", "SEARCHED_ITEMS", "below", "uncompiled"]

SEARCHED_ITEMS = 10_000
"""A container with more items than this is data, such as a replay buffer, and is not searched."""
ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)
"""What leads nowhere, but for functions that close over variables."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Kinds of generators of random numbers, of which a trainer may keep some of its own."""

_TORCH_INTERNALS = frozenset(vars(nn.Module())) | {"_trainer", "_fabric"}
_DATA_LIBRARIES = frozenset({"numpy", "pyarrow", "pandas"})
_TORCH_WITHOUT_USERS_OBJECTS = ("torch._", "torch.utils.data")
_HOSTS = ("lightning.pytorch.", "pytorch_lightning.")
"""Whose objects, callbacks and data modules of users included, lead to the run that hosts the trainer class."""
_KEPT_ON_CLASSES = (nn.Module, Optimizer, LRScheduler, GradScaler, *GENERATORS, dict, list)
_CONTAINERS = (list, tuple, deque, set, frozenset)


def below(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """What `value` leads to by one step, with paths that begin with its own."""
    if isinstance(value, Tensor | Optimizer | GradScaler):
        return ()
    if isinstance(value, nn.Module):
        return _attributes_of_module(path, uncompiled(value))
    if isinstance(value, LRScheduler):
        return ((f"{path}.optimizer", value.optimizer),)
    return _children(path, value)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that a compiled one was made from, else the module itself."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else module


def _children(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, CountedDict):  # a job's hyperparameters, which would count as read
        return ()
    if isinstance(value, Mapping):
        return ((f"{path}[{key_text(k)}]", v) for k, v in value.items()) if len(value) <= SEARCHED_ITEMS else ()
    if isinstance(value, _CONTAINERS):
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        if kind.__len__(value) > SEARCHED_ITEMS:  # a subclass may count otherwise, or refuse to
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


def _in_fixed_order(path: str, items: set[Any] | frozenset[Any]) -> list[Any]:
    """The items of a set in an order that does not depend on addresses, which differ from rank to rank."""
    ordered = sorted(items, key=_fingerprint)
    for a, b in itertools.pairwise(ordered):
        if _fingerprint(a) == _fingerprint(b) and not isinstance(a, ATOMS):
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
    return f"{type(item).__qualname__} {item!r}" if isinstance(item, ATOMS) else type(item).__qualname__
