"""How many samples and tokens a batch has, where it tells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["samples_in", "tokens_in"]

TOKENS = ("input_ids", "tokens", "token_ids")
"""Entries of a batch, or columns, that hold one number for each token."""


def samples_in(batch: Any) -> int | None:
    """The samples of a batch; None where it does not tell.

    Rows of an Arrow batch; the first dimension of a tensor or array, or of the first one in a mapping or sequence; the
    length of a sequence of anything else.
    """
    rows = getattr(batch, "num_rows", None)
    if isinstance(rows, int):
        return rows
    size = _first_dimension(batch)
    if size is not None:
        return size
    if isinstance(batch, Mapping):
        values = list(batch.values())
    elif isinstance(batch, list | tuple):
        values = list(batch)
    else:
        return None
    sizes = (_first_dimension(value) for value in values)
    first = next((size for size in sizes if size is not None), None)
    if first is not None:
        return first
    if isinstance(batch, Mapping):
        return next((len(value) for value in values if isinstance(value, list | tuple)), None)
    return len(batch)


def tokens_in(batch: Any) -> int | None:
    """The tokens of a batch, padding included; None where it has no entry that is named as one of `TOKENS`."""
    for name in TOKENS:
        if isinstance(batch, Mapping) and name in batch:
            return _elements(batch[name])
        column_names = getattr(getattr(batch, "schema", None), "names", ())
        if name in column_names:
            return _elements(batch.column(name))
    return None


def _first_dimension(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    return int(shape[0]) if isinstance(shape, tuple) and len(shape) else None


def _elements(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return math.prod(shape)
    if hasattr(value, "flatten"):  # an Arrow column of lists
        return len(value.flatten())
    if isinstance(value, list | tuple):
        return sum(len(each) if isinstance(each, list | tuple) else 1 for each in value)
    return None
