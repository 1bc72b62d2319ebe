"""The order in which a sampler hands out rows, so that a resume can repeat it and prove that it is the same.

A sampler is any iterable of indices. Its order may depend on random numbers of Python, NumPy and torch, on generators
that it holds, and on its attributes: a counter of epochs, or a list that it shuffles in place. All of these are kept as
they were when the epoch began. A resume puts them back, lets the sampler draw the order again, and compares a checksum
of the indices that were handed out before.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch

from ...adapter.plumbing.generators import GENERATORS, held_generators, set_state, state_as_arrays
from .codec.tensors import is_storable

_ATOMS = (type(None), bool, int, float, str)
_OTHER = object()
"""Stands for a value that is not kept."""


class SamplerOrder:
    """Iterates over a sampler and remembers what it has handed out.

    Attributes:
        sampler: The sampler of a loader: of batches, or of rows if the loader makes no batches.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._as_made = self._attributes()
        self._begins = 0
        """Number of iterators made in this pass; torch makes two in the first pass of a loader with workers."""
        self._checksum = 0
        self._waiting: deque[Any] = deque()
        """Indices that were handed out, and whose batch was not yet delivered."""

    def begin(self) -> dict[str, Any]:
        """Begin a pass; return the `source_state` from which its order follows."""
        self._begins = 0
        return self.source_state()

    @property
    def is_of_torch(self) -> bool:
        """Whether all samplers are classes of torch: these draw only from torch's generators."""
        return all(type(each).__module__.startswith("torch.utils.data") for each in _nested_samplers(self.sampler))

    def __iter__(self) -> Iterator[Any]:
        self._begins += 1
        self._checksum = 0
        self._waiting.clear()
        return self._yield_recorded(iter(self.sampler))

    def __len__(self) -> int:
        return len(self.sampler)

    def _yield_recorded(self, indices: Iterator[Any]) -> Iterator[Any]:
        for each in indices:
            self._note(each)
            self._waiting.append(each)
            yield each

    def _note(self, indices: Any) -> None:
        self._checksum = zlib.crc32(_as_text(indices).encode(), self._checksum)

    def note_delivery(self) -> None:
        """Note that the batch of the oldest indices was delivered."""
        self._waiting.popleft()

    def source_state(self) -> dict[str, Any]:
        """Return the state of the samplers that decides the next order, without the random numbers of the process."""
        # Skip values that never change: settings (they may differ at a resume) and the lengths of all rows.
        made: chain[dict[str, Any]] = chain(self._as_made, repeat({}))  # a sampler made later had no values then
        changed = [
            {name: value for name, value in kept.items() if not _is_same(value, as_made.get(name, _OTHER))}
            for kept, as_made in zip(self._attributes(), made, strict=False)
        ]
        return {"attributes": changed, "generators": [state_as_arrays(each) for each in self._generators()]}

    def _attributes(self) -> list[dict[str, Any]]:
        """Return copies of the attributes of each sampler that are plain values."""
        samplers = _nested_samplers(self.sampler)
        every = [{name: _copy_plain(value) for name, value in vars(each).items()} for each in samplers]
        return [{name: value for name, value in each.items() if value is not _OTHER} for each in every]

    def _generators(self) -> list[Any]:
        held = [value for sampler in _nested_samplers(self.sampler) for value in vars(sampler).values()]
        # Exclude other objects, such as a dataset: its generators draw numbers for rows, in another order.
        return held_generators(*(value for value in held if isinstance(value, (*GENERATORS, list, tuple, dict))))

    def set_source_state(self, state: Mapping[str, Any]) -> None:
        """Put back a result of `source_state`."""
        for sampler, values in zip(_nested_samplers(self.sampler), state["attributes"], strict=False):
            for name, value in values.items():
                own, copy = vars(sampler).get(name), _copy_plain(value)
                if isinstance(own, list) and isinstance(copy, list):
                    own[:] = copy  # others may hold this list too
                else:
                    vars(sampler)[name] = copy
        for generator, saved in zip(self._generators(), state["generators"], strict=False):
            set_state(generator, saved)

    def progress(self) -> dict[str, Any] | None:
        """Return facts about the indices handed out in this pass; None if no checkpoint can store their type."""
        waiting = list(self._waiting)
        order = {"begins": self._begins, "checksum": self._checksum, "waiting": waiting}
        return order if is_storable(waiting) else None

    def rest(
        self, delivered: int, progress: Mapping[str, Any] | None, after_begin: Callable[[], None]
    ) -> Iterator[Any] | None:
        """Draw the order again and return what follows the indices of the batches delivered before a checkpoint.

        Args:
            delivered: Number of batches that were delivered.
            progress: A result of `progress`; None accepts any order.
            after_begin: Called after the first iterator is made, and before it hands out indices.

        Returns:
            The remaining indices; None if the indices before them are not the same as in the saved run.
        """
        waiting = [] if progress is None else list(progress["waiting"])
        self._begins = 1 if progress is None else progress["begins"]
        order = iter(self.sampler)
        after_begin()
        for _ in range(1, self._begins):
            order = iter(self.sampler)
        self._checksum = 0
        self._waiting = deque(waiting)
        for each in islice(order, delivered + len(waiting)):
            self._note(each)
        if progress is not None and self._checksum != progress["checksum"]:
            return None
        first = [] if delivered or waiting else list(islice(order, 1))  # a sampler draws its order for the first item
        return self._yield_rest(waiting, first, order)

    def _yield_rest(self, waiting: list[Any], first: list[Any], order: Iterator[Any]) -> Iterator[Any]:
        yield from waiting
        yield from self._yield_recorded(iter(first))
        # Do not ask for an item earlier than an uninterrupted run: torch's sampler draws once more after the last item.
        yield from self._yield_recorded(order)


def _nested_samplers(sampler: Any) -> list[Any]:
    """Return `sampler` and the samplers that it holds: what can be iterated over, but not indexed."""
    found: dict[int, Any] = {}
    waiting = [sampler]
    while waiting:
        each = waiting.pop()
        is_sampler = isinstance(each, Iterable) and hasattr(each, "__dict__") and not hasattr(each, "__getitem__")
        if is_sampler and id(each) not in found and not isinstance(each, type):
            found[id(each)] = each
            waiting += vars(each).values()
    return list(found.values())


def _copy_plain(value: Any) -> Any:
    """Return a copy of numbers, texts, arrays, and lists and dictionaries of them; `_OTHER` for all else."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if type(value) is torch.Tensor and value.device.type == "cpu" else _OTHER
    if type(value) is np.ndarray:
        return value.copy() if value.dtype.kind in "biuf" else _OTHER
    if type(value) in (list, tuple):
        if set(map(type, value)).issubset(_ATOMS):
            return type(value)(value)
        copies = [_copy_plain(each) for each in value]
        return _OTHER if any(each is _OTHER for each in copies) else type(value)(copies)
    if type(value) is dict and {type(key) for key in value} <= {int, str}:
        items = {key: _copy_plain(each) for key, each in value.items()}
        return _OTHER if any(each is _OTHER for each in items.values()) else items
    return _OTHER


def _is_same(value: Any, other: Any) -> bool:
    """Whether two results of `_copy_plain` are equal, types included."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple) and not set(map(type, value)).issubset(_ATOMS):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return bool(value == other)


def _as_text(indices: Any) -> str:
    return repr(indices.tolist() if isinstance(indices, torch.Tensor | np.ndarray) else indices)
