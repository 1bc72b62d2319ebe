"""The rows of each rank in each step: arithmetic on row counts, without data.

The remaining rows of an epoch are numbered 0, 1, 2, … in the order of the epoch. This module cuts that range into steps
and each step into ranks. Nothing here depends on files, threads or time, so every rank computes the same plan.

The rule for remainders: every rank has the same number of steps, and each of its batches has at least one row and at
most `batch_size` rows. The last step of an epoch shares the remaining rows as evenly as possible. If there are fewer of
them than ranks, the step before it gives up rows, so that the last step has one row on each rank. So an epoch has as
many steps as on one process whose batches are as large as those of all ranks together. With a batch size of 1 no step
can give up a row; the remaining rows then come before the rows of the next epoch. With ``drop_last`` only full steps
are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal, TypeAlias

import msgspec

Shard: TypeAlias = Literal["rows", "row_groups"]

Span: TypeAlias = tuple[int, int, int]
"""Epoch, first row and end (exclusive) in the order of that epoch."""


class Share(msgspec.Struct, frozen=True):
    """The division of the `total` remaining rows of an epoch among steps and ranks.

    If `shard` is ``rows``, step k takes the next ``batch_size * world_size`` rows, and rank r takes the r-th slice of
    them, so that one process with that batch size sees the same rows. If it is ``row_groups``, each rank has one
    contiguous block and decodes nothing else; two ranks read a row group on the border of their blocks.
    """

    total: Annotated[int, msgspec.Meta(ge=0)]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    world_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    shard: Shard = "rows"
    drop_last: bool = False

    @property
    def step_rows(self) -> int:
        """Rows of a full step over all ranks."""
        return self.batch_size * self.world_size

    @property
    def steps(self) -> int:
        """Number of steps, equal on all ranks."""
        full, rest = divmod(self.total, self.step_rows)
        return full + (not self.drop_last and (rest >= self.world_size or self._borrows))

    @property
    def full_steps(self) -> int:
        """Number of steps with `batch_size` rows on each rank; they come first."""
        return self.total // self.step_rows - self._borrows

    @property
    def _borrows(self) -> bool:
        """Whether the last step has one row per rank and takes some of these rows from the step before it."""
        full, rest = divmod(self.total, self.step_rows)
        return not self.drop_last and 0 < rest < self.world_size and full > 0 and self.batch_size > 1

    @property
    def usable(self) -> int:
        """Number of rows that the steps hand out. With ``drop_last`` the others are dropped, otherwise left over."""
        return min(self.total, self.steps * self.step_rows)

    def consumed(self, steps: int) -> int:
        """Return the number of rows that the first `steps` steps hand out over all ranks."""
        if steps >= self.steps:
            return self.usable
        return steps * self.step_rows if steps <= self.full_steps else self.usable - self.world_size

    def interval(self, step: int, rank: int) -> tuple[int, int]:
        """Return the first row and the end of the part of `rank` in `step`."""
        if self.shard == "row_groups":
            return self._place_in_block(rank, step), self._place_in_block(rank, step + 1)
        start = self.consumed(step)
        return _part(start, self.consumed(step + 1) - start, rank, self.world_size)

    def intervals(self, first: int, end: int, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the intervals of `rank` in the steps from `first` to below `end`."""
        full = max(first, min(end, self.full_steps))
        start, stop = self.interval(first, rank) if first < full else (0, 0)
        stride = self.step_rows if self.shard == "rows" else self.batch_size
        # Full steps are equally far apart. With few rows in a step, calling `interval` would take longer than the step.
        starts, stops = (range(place, place + (full - first) * stride, stride) for place in (start, stop))
        return chain(zip(starts, stops, strict=True), (self.interval(step, rank) for step in range(full, end)))

    def rest(self, steps: int) -> list[tuple[int, int]]:
        """Return the ranges of rows that no rank has trained after `steps` steps, in order; ranges may be empty."""
        if self.shard == "rows":
            return [(self.consumed(steps), self.total)]
        left = [(self._place_in_block(rank, steps), self.block(rank)[1]) for rank in range(self.world_size)]
        return [*left, (self.usable, self.total)]

    def block(self, rank: int) -> tuple[int, int]:
        """Return the bounds of the block of `rank` with ``row_groups``."""
        return _part(0, self.usable, rank, self.world_size)

    def _place_in_block(self, rank: int, steps: int) -> int:
        first, end = self.block(rank)
        if steps >= self.steps:
            return end
        return first + steps * self.batch_size if steps <= self.full_steps else end - 1


def _part(start: int, rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the part of `rank` if ``start:start+rows`` is cut as evenly as possible; longer parts come first."""
    base, longer = divmod(rows, world_size)
    first = start + rank * base + min(rank, longer)
    return first, first + base + (rank < longer)


def cut(spans: Sequence[Span], ranges: Iterable[tuple[int, int]]) -> list[Span]:
    """Return the parts of `spans`, laid end to end, that lie in `ranges`; neighbors are merged."""
    result: list[Span] = []
    for start, end in ranges:
        offset = 0
        for epoch, first, last in spans:
            low, high = max(start - offset, 0) + first, min(end - offset, last - first) + first
            if low < high:
                if result and result[-1][0] == epoch and result[-1][2] == low:
                    low = result.pop()[1]
                result.append((epoch, low, high))
            offset += last - first
    return result
