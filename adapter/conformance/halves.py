"""A raw batch cut in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["halves"]


def halves(batch: Any) -> tuple[Any, Any] | None:
    """The first and the second half of the rows of a raw batch, or None where it has no rows that can be told apart.

    Arrow tables and batches, tensors, arrays, lists of rows, and mappings of columns are cut; an odd row is left out.
    """
    rows = _rows(batch)
    if rows is None or rows < 2:
        return None
    middle = rows // 2
    return _cut(batch, 0, middle), _cut(batch, middle, middle)


def _rows(batch: Any) -> int | None:
    if hasattr(batch, "num_rows"):
        return int(batch.num_rows)
    if isinstance(batch, Mapping):
        counts = {_rows(column) for column in batch.values()}
        return counts.pop() if len(counts) == 1 else None
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, Sequence):
        return len(batch)
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape else None


def _cut(batch: Any, start: int, length: int) -> Any:
    if hasattr(batch, "num_rows"):
        return batch.slice(start, length)
    if isinstance(batch, Mapping):
        return {name: _cut(column, start, length) for name, column in batch.items()}
    return batch[start : start + length]
