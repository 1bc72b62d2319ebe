"""Generators of random numbers of Python, NumPy and torch: their types and their states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Types of random number generators that a trainer or a dataset may keep."""


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
