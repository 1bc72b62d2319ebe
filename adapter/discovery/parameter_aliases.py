"""Where a trainer keeps parameters of its modules by themselves, in a list say, and how others take their place."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..plumbing.counted_dict import CountedDict

__all__ = ["Alias", "aliases", "key_text", "places"]

_NOT_THE_TRAINERS = (Tensor, nn.Module, Optimizer, LRScheduler, type, types.ModuleType, CountedDict)
_Place = tuple[str, Any, Callable[[Any], None] | None]


@dataclass(frozen=True)
class Alias:
    """A parameter in a place outside of its module."""

    path: str
    """As the trainer's author would write it."""
    value: Tensor
    put: Callable[[Tensor], None] | None
    """Puts another tensor into this place; None where that cannot be done, as in a tuple."""


def aliases(nodes: Iterable[tuple[str, Any]], parameters: Collection[int]) -> Iterator[Alias]:
    """The places among `nodes` that hold a tensor of `parameters`.

    Args:
        nodes: All that a trainer leads to, with paths, containers included.
        parameters: By their ids.
    """
    for path, node in nodes:
        for where, value, put in () if isinstance(node, _NOT_THE_TRAINERS) else places(path, node):
            if isinstance(value, Tensor) and id(value) in parameters:
                yield Alias(where, value, put)


def key_text(key: Any) -> str:
    """A key of a mapping as it is written in a path; the values of a tensor are not read."""
    if isinstance(key, str):
        return f'"{key}"'
    return f"{type(key).__name__}{tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)


def places(path: str, node: Any) -> Iterator[_Place]:
    """What an object at `path` keeps: where, what, and what puts something else there; None where that cannot be."""
    if isinstance(node, Mapping):
        yield from _of_mapping(path, node)
    elif isinstance(node, list | deque):
        yield from ((f"{path}[{i}]", v, functools.partial(node.__setitem__, i)) for i, v in enumerate(node))
    elif isinstance(node, tuple | set | frozenset):
        yield from ((f"{path}[{i}]", v, None) for i, v in enumerate(node))
    elif isinstance(node, types.FunctionType):
        for name, cell in zip(node.__code__.co_freevars, node.__closure__ or (), strict=True):
            yield f"{path}.<closure>.{name}", _content(cell), functools.partial(setattr, cell, "cell_contents")
    else:
        for name in (*getattr(node, "__dict__", ()), *_slots(type(node))):
            # Past a `__setattr__` of a frozen dataclass.
            yield f"{path}.{name}", getattr(node, name, None), functools.partial(object.__setattr__, node, name)


def _of_mapping(path: str, node: Mapping[Any, Any]) -> Iterator[_Place]:
    for key, value in node.items():
        put = functools.partial(node.__setitem__, key) if isinstance(node, MutableMapping) else None
        yield f"{path}[{key_text(key)}]", value, put
        rekey = functools.partial(_rekey, node, key) if isinstance(node, MutableMapping) else None
        yield f"{path}, which has a key that", key, rekey


def _rekey(node: MutableMapping[Any, Any], old: Any, new: Any) -> None:
    """Another key in place of `old`, which keeps its place in the order."""
    items = [(new if key is old else key, value) for key, value in node.items()]
    node.clear()
    node.update(items)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (s for s in ((slots,) if isinstance(slots, str) else slots) if not s.startswith("__"))
