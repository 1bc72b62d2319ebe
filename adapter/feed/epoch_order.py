"""The order of the rows in an epoch, as a function of row counts, seed and epoch alone.

Without shuffling it is the order of the files. With shuffling the row groups come in random order, and within a row
group each window of `window` consecutive rows is permuted; a window as large as a row group is a perfect shuffle
within it. Rows of different row groups are not mixed: a batch comes from one row group, or from two at a border, so
data that is sorted by label should be written in random order, or with row groups much smaller than the epoch.

Permutations come from sorted raw Philox output. NumPy keeps that stream stable between versions, which it does not
promise for ``Generator.permutation``; a run may therefore be resumed under another NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .row_plan import Span

__all__ = ["EpochOrder", "Order", "Piece", "permutation"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one row group, or of several that follow each other, in the order of an epoch."""

    epoch: int
    group: int
    first: int
    """First row, counted from the start of `group`."""
    end: int
    at: int
    """Place of the first row among the rows that are handed out."""
    last_group: int
    """The same as `group` where it is only one."""

    def __len__(self) -> int:
        return self.end - self.first

    def within(self, start: int, end: int) -> Piece:
        """The part of the piece that is handed out as rows ``start:end``."""
        skipped, cut = max(start - self.at, 0), max(self.at + len(self) - end, 0)
        return replace(self, first=self.first + skipped, end=self.end - cut, at=self.at + skipped)


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

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch."""
        return _epoch_order(self, epoch)

    def pieces(self, spans: Iterable[Span]) -> Iterator[Piece]:
        """The row groups, or parts of them, that make up `spans`, in order."""
        at = 0
        for epoch, first, end in spans:
            yield from self.epoch(epoch).pieces(first, end, at)
            at += end - first

    def window_permutation(self, epoch: int, group: int, window: int, rows: int) -> npt.NDArray[np.intp]:
        """Where the rows of one window come from."""
        return permutation(rows, (self.seed, 1, epoch, group, window))


@dataclass(frozen=True)
class EpochOrder:
    """The row groups of one epoch in order, and where each begins."""

    number: int
    groups: npt.NDArray[np.intp]
    starts: npt.NDArray[np.int64]

    def pieces(self, first: int, end: int, at: int) -> Iterator[Piece]:
        """The pieces of rows ``first:end`` of the epoch; the first row of them is handed out as row `at`."""
        index = int(np.searchsorted(self.starts, first, side="right")) - 1
        while first < end:
            start, stop = int(self.starts[index]), int(self.starts[index + 1])
            last = min(end, stop)
            if first < last:
                group = int(self.groups[index])
                yield Piece(self.number, group, first - start, last - start, at, group)
            at += last - first
            first = last
            index += 1


@lru_cache(maxsize=8)
def _epoch_order(order: Order, epoch: int) -> EpochOrder:
    count = len(order.group_rows)
    groups = permutation(count, (order.seed, 0, epoch)) if order.shuffle else np.arange(count, dtype=np.intp)
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.asarray(order.group_rows, dtype=np.int64)[groups], out=starts[1:])
    return EpochOrder(epoch, groups, starts)


def permutation(count: int, key: Sequence[int]) -> npt.NDArray[np.intp]:
    """A random permutation of ``0 … count-1`` that depends on `key` (integers >= 0) alone."""
    raw = np.asarray(np.random.Philox(np.random.SeedSequence(key)).random_raw(count), dtype=np.uint64)
    # Each number carries its own index in the low bits: sorting values is many times faster than argsort.
    low = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    return (np.sort((raw & ~low) | np.arange(count, dtype=np.uint64)) & low).astype(np.intp)
