"""The order of the rows in an epoch, as a function of row counts, seed and epoch alone.

Without shuffling it is the order of the files. With shuffling the row groups come in random order, and within a row
group each window of `window` consecutive rows is permuted; a window as large as a row group is a perfect shuffle
within it. Rows of different row groups are not mixed: a batch comes from one row group, or from two at a border, so
data that is sorted by label should be written in random order, or with row groups much smaller than the epoch.

Permutations come from sorted raw Philox output. NumPy keeps that stream stable between versions, which it does not
promise for ``Generator.permutation``; a run may therefore be resumed under another NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .row_plan import Span

__all__ = ["Order", "Piece", "permutation"]


class Piece(NamedTuple):
    """Consecutive rows of one row group, or also of those that follow it, in the order of an epoch."""

    epoch: int
    group: int
    first: int
    """First row, counted from the start of `group`."""
    end: int


@dataclass(frozen=True)
class Order:
    """The order of all epochs over row groups of the given sizes."""

    group_rows: tuple[int, ...]
    seed: int = 0
    shuffle: bool = False
    window: int = 65_536

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return sum(self.group_rows)

    def pieces(self, span: Span, reach: Callable[[int], int]) -> Iterator[Piece]:
        """The parts of row groups that make up `span`, in order.

        Args:
            span: Rows of an epoch.
            reach: How many rows from the start of a row group on are read together, those of the groups that follow it
                included; asked where rows are not shuffled.
        """
        epoch, first, end = span
        groups, starts = _epoch_order(self, epoch)
        while first < end:
            index = int(np.searchsorted(starts, first, side="right")) - 1
            group, start = int(groups[index]), int(starts[index])
            last = min(end, start + (self.group_rows[group] if self.shuffle else reach(group)))
            yield Piece(epoch, group, first - start, last - start)
            first = last

    def terms(self) -> dict[str, int]:
        """What the order depends on beside the row groups, for a checkpoint."""
        return {"seed": self.seed, "shuffle": int(self.shuffle), "window": self.window if self.shuffle else 0}

    def window_permutation(self, epoch: int, group: int, window: int, rows: int) -> npt.NDArray[np.intp]:
        """Where the rows of one window come from."""
        return permutation(rows, (self.seed, 1, epoch, group, window))


@lru_cache(maxsize=8)
def _epoch_order(order: Order, epoch: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """The row groups of an epoch in order, and the place where each begins; then that where the last one ends."""
    count = len(order.group_rows)
    groups = permutation(count, (order.seed, 0, epoch)) if order.shuffle else np.arange(count, dtype=np.intp)
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.asarray(order.group_rows, dtype=np.int64)[groups], out=starts[1:])
    return groups, starts


def permutation(count: int, key: Sequence[int]) -> npt.NDArray[np.intp]:
    """A random permutation of ``0 … count-1`` that depends on `key` (integers >= 0) alone."""
    raw = np.asarray(np.random.Philox(np.random.SeedSequence(key)).random_raw(count), dtype=np.uint64)
    # Each number carries its own index in the low bits: sorting values is many times faster than argsort.
    low = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    return (np.sort((raw & ~low) | np.arange(count, dtype=np.uint64)) & low).astype(np.intp)
