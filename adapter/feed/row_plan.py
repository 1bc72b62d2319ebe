"""Which rows each rank trains in each step: arithmetic on row counts, without data.

Rows that an epoch still has to hand out are numbered 0, 1, 2, … in the order of the epoch; this module cuts that range
into steps and each step into ranks. Nothing here depends on files, threads or the moment, so every rank comes to the
same plan by itself.

The rule for remainders: every rank has the same number of steps, no rank ever gets a batch without rows, and none gets
more rows than it asked for. The last step of an epoch hands out what is left, shared as evenly as possible. When fewer
rows are left than there are ranks, the step before gives up as many as it takes for one row on each rank, so that an
epoch has as many steps as one process with the batches together. With a batch size of 1 no step can give up a row:
what is left of an epoch then comes before the rows of the next one. With ``drop_last`` a step is full or it is not
trained.
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
    """How `total` rows are shared by the steps and ranks of what is left of an epoch.

    ``rows``: step k takes the next ``batch_size * world_size`` rows and rank r the r-th slice of them, so that one
    process with that batch size sees the same rows. ``row_groups``: each rank owns one contiguous block, so that it
    decodes nothing else; only a row group on the border of two blocks is read by two ranks.
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
        """How many steps have `batch_size` rows on each rank; they come first."""
        return self.total // self.step_rows - self._borrows

    @property
    def _borrows(self) -> bool:
        """Whether the last step has one row a rank, some of them from the step before it."""
        full, rest = divmod(self.total, self.step_rows)
        return not self.drop_last and 0 < rest < self.world_size and full > 0 and self.batch_size > 1

    @property
    def usable(self) -> int:
        """Rows that the steps hand out; with ``drop_last`` the others are dropped, else they are left over."""
        return min(self.total, self.steps * self.step_rows)

    def consumed(self, steps: int) -> int:
        """Rows that the first `steps` steps hand out over all ranks."""
        if steps >= self.steps:
            return self.usable
        return steps * self.step_rows if steps <= self.full_steps else self.usable - self.world_size

    def interval(self, step: int, rank: int) -> tuple[int, int]:
        """First row and end of what `rank` trains in `step`."""
        if self.shard == "row_groups":
            return self._place_in_block(rank, step), self._place_in_block(rank, step + 1)
        start = self.consumed(step)
        return _part(start, self.consumed(step + 1) - start, rank, self.world_size)

    def intervals(self, first: int, end: int, rank: int) -> Iterator[tuple[int, int]]:
        """The intervals of `rank` in the steps from `first` to below `end`."""
        full = max(first, min(end, self.full_steps))
        start, stop = self.interval(first, rank) if first < full else (0, 0)
        stride = self.step_rows if self.shard == "rows" else self.batch_size
        # Of full steps by adding alone: a step of a few rows takes no longer than the arithmetic of `interval`.
        starts, stops = (range(place, place + (full - first) * stride, stride) for place in (start, stop))
        return chain(zip(starts, stops, strict=True), (self.interval(step, rank) for step in range(full, end)))

    def rest(self, steps: int) -> list[tuple[int, int]]:
        """Ranges that no rank has trained after `steps` steps, in order; some may be empty."""
        if self.shard == "rows":
            return [(self.consumed(steps), self.total)]
        left = [(self._place_in_block(rank, steps), self.block(rank)[1]) for rank in range(self.world_size)]
        return [*left, (self.usable, self.total)]

    def block(self, rank: int) -> tuple[int, int]:
        """Bounds of everything that `rank` trains with ``row_groups``."""
        return _part(0, self.usable, rank, self.world_size)

    def _place_in_block(self, rank: int, steps: int) -> int:
        first, end = self.block(rank)
        if steps >= self.steps:
            return end
        return first + steps * self.batch_size if steps <= self.full_steps else end - 1


def _part(start: int, rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part of `rank` when ``start:start+rows`` is cut as evenly as possible; longer parts come first."""
    base, longer = divmod(rows, world_size)
    first = start + rank * base + min(rank, longer)
    return first, first + base + (rank < longer)


def cut(spans: Sequence[Span], ranges: Iterable[tuple[int, int]]) -> list[Span]:
    """The parts of `spans`, laid end to end, that lie in `ranges`; neighbours are merged."""
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
