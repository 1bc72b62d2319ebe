"""Generators of random numbers of Python, NumPy and torch: their types, their states, and the search for them."""

from __future__ import annotations

import contextlib
import functools
import random
import types
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Types of random number generators that a trainer or a dataset may keep."""

_SEARCHED_ITEMS = 1_000
"""Maximum size of a list or dictionary that is searched for generators; longer ones hold data."""
_SEARCHED_OBJECTS = 10_000
_ATOMS = (str, bytes, int, float, complex, type, types.ModuleType, torch.Tensor, np.ndarray, type(None))


def state_of(generator: Any) -> Any:
    """Return the state of one of `GENERATORS`, or of the module ``random``, as plain values, arrays and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _bits(generator).state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, words, gauss = generator.getstate()
    # The 625 words as one tensor, because that is stored and compared far faster than separate numbers.
    return {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss}


def set_state(generator: Any, state: Any) -> None:
    """Restore a result of `state_of`, on any device, also with NumPy arrays in place of its tensors."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state) if isinstance(state, np.ndarray) else state.cpu())
    elif isinstance(generator, np.random.Generator):
        _bits(generator).state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def _bits(generator: np.random.Generator) -> Any:
    """Return the bit generator of a NumPy generator, untyped: each class of them has another type of state."""
    return generator.bit_generator


def state_as_arrays(generator: Any) -> Any:
    """Return the state of a generator with arrays instead of tensors: a data worker sends each tensor in a file."""
    state = state_of(generator)
    if isinstance(state, torch.Tensor):
        return state.numpy()
    if isinstance(generator, random.Random) or generator is random:
        return {**state, "words": state["words"].numpy().astype(np.uint32)}
    return state


def held_generators(*roots: Any) -> list[Any]:
    """Return the generators of random numbers that `roots` hold, each once, in a stable order.

    Attributes, closures and small containers are searched, not the data in them.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = list(reversed(roots))
    while waiting and len(seen) < _SEARCHED_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom):  # it has no state
                found[id(value)] = value
            continue
        waiting += reversed(_held_by(value))
    return list(found.values())


def held_states(root: Any) -> list[Any]:
    """Return the states of the generators that `root` holds."""
    return list(map(state_of, held_generators(root)))


def set_held_states(root: Any, states: list[Any]) -> None:
    """Restore a result of `held_states`; a generator without a state keeps its own."""
    for generator, state in zip(held_generators(root), states, strict=False):
        set_state(generator, state)


def _held_by(value: Any) -> list[Any]:
    """Return the objects in `value` among which the search for generators continues."""
    if isinstance(value, dict | list | tuple) and len(value) > _SEARCHED_ITEMS:
        return []
    if isinstance(value, dict):
        return list(dict.values(value))  # not a method of a subclass: some count what is read
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        with contextlib.suppress(ValueError):  # an empty cell
            return [cell.cell_contents for cell in cells]
        return []
    return list(getattr(value, "__dict__", {}).values())
