"""The order of the rows in an epoch, and the position of a feed in that order; a checkpoint holds the position.

The order depends only on row counts, seed and epoch. Without shuffling it is the order of the files. With shuffling,
row groups come in random order, and each window of `window` consecutive rows of a row group is permuted; a window as
large as the row group is a perfect shuffle within it. Rows of different row groups are not mixed: a batch comes from
one row group, or from two at a border. So data that is sorted by label should be written in random order, or with row
groups much smaller than the epoch.

Permutations are made by sorting raw Philox output. NumPy keeps that stream stable between versions, but does not
promise this for ``Generator.permutation``. So a run can be resumed under another NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ..contract.exceptions import InputError
from .row_plan import Share, Span, cut

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Piece(NamedTuple):
    """Consecutive rows of a row group, or of several consecutive row groups, in the order of an epoch."""

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
        """Yield the parts of row groups that make up `span`, in order.

        Args:
            span: Rows of an epoch.
            reach: Returns how many rows are read together from the start of a row group, including rows of the
                following groups. Called only if rows are not shuffled.
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
        """Return the settings that determine the order together with the row groups, for a checkpoint."""
        return {"seed": self.seed, "shuffle": int(self.shuffle), "window": self.window if self.shuffle else 0}

    def window_permutation(self, epoch: int, group: int, window: int, rows: int) -> npt.NDArray[np.intp]:
        """Return, for each place of a shuffled window, the row that comes there, counted from the window's start."""
        return permutation(rows, (self.seed, 1, epoch, group, window))


@lru_cache(maxsize=8)
def _epoch_order(order: Order, epoch: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Return the row groups of an epoch in order; and the first row of each, followed by the end of the last one."""
    count = len(order.group_rows)
    groups = permutation(count, (order.seed, 0, epoch)) if order.shuffle else np.arange(count, dtype=np.intp)
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.asarray(order.group_rows, dtype=np.int64)[groups], out=starts[1:])
    return groups, starts


def permutation(count: int, key: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return a random permutation of ``0 … count-1`` that depends only on `key` (integers >= 0)."""
    raw = np.asarray(np.random.Philox(np.random.SeedSequence(key)).random_raw(count), dtype=np.uint64)
    # Each number carries its own index in the low bits: sorting values is many times faster than argsort.
    low = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    return (np.sort((raw & ~low) | np.arange(count, dtype=np.uint64)) & low).astype(np.intp)


@dataclass(frozen=True)
class Layout:
    """The order of the rows and their division among ranks: everything that a position depends on."""

    order: Order
    epoch: Share
    """The plan of a complete epoch."""

    def share(self, rows: int) -> Share:
        """Return the plan for the last `rows` rows."""
        return replace(self.epoch, total=rows)


class Position(msgspec.Struct, frozen=True):
    """The place after `step` steps over `spans`. The last span belongs to `epoch`.

    `spans` is a complete epoch unless the number of ranks, the batch size or the sharding changed within it; then it is
    the rest of the epoch at the change. Rows that the steps of this pass cannot hand out (too few for the ranks, see
    `Share`) come before the rows of the next epoch; with ``drop_last`` they are dropped.
    """

    epoch: _Count
    spans: tuple[tuple[_Count, _Count, _Count], ...]
    step: _Count = 0
    before: _Count = 0
    """Steps of the epoch before the change; a loop may continue its count from here."""

    @classmethod
    def start_of(cls, epoch: int, order: Order) -> Position:
        """Return the place before the first row of `epoch`."""
        return cls(epoch, ((epoch, 0, order.rows),))

    @property
    def rows(self) -> int:
        """Rows of the spans."""
        return sum(end - first for _, first, end in self.spans)

    def following(self, layout: Layout) -> Position:
        """Return the start of the next pass."""
        whole = (self.epoch + 1, 0, layout.order.rows)
        return Position(self.epoch + 1, (*self.left_over(layout), whole))

    def normalized(self, layout: Layout) -> Position:
        """Return this place; the end of a pass becomes the start of the next pass."""
        return self if self.step < layout.share(self.rows).steps else self.following(layout)

    def left_over(self, layout: Layout) -> list[Span]:
        """Return the rows that this pass leaves to the next one."""
        share = layout.share(self.rows)
        return [] if share.drop_last else cut(self.spans, [(share.usable, share.total)])

    def state(self, layout: Layout) -> dict[str, Any]:
        """Return everything needed to continue, as JSON values."""
        state = _State(version=1, position=self, share=layout.epoch, order=layout.order.terms())
        plain: dict[str, Any] = msgspec.to_builtins(state)
        return plain

    @classmethod
    def restored(cls, state: Mapping[str, Any], layout: Layout) -> Position:
        """Return the position that `state` describes, for a feed with `layout`.

        If the number of ranks, the batch size or the sharding differs, the rest of the epoch is divided again.

        Raises:
            InputError: The state is damaged or belongs to another kind of source, to other rows or to another order.
        """
        try:
            found = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise InputError(f"The position is damaged or belongs to another kind of source: {error}.") from None
        _require_same_rows(found, layout)
        saved, old = found.position, Layout(layout.order, found.share)
        before = saved.before + saved.step
        if saved.step and saved.step >= old.share(saved.rows).steps:
            return replace(saved.following(old), before=0 if old == layout else before)
        if old == layout:
            return saved
        rest = tuple(cut(saved.spans, old.share(saved.rows).rest(saved.step)))
        return cls(saved.epoch, rest, before=before)


class _State(msgspec.Struct):
    """A position in a checkpoint, with the settings that it depends on."""

    version: Literal[1]
    position: Position
    share: Share
    order: dict[str, int]


def _require_same_rows(state: _State, layout: Layout) -> None:
    """Raise `InputError` if a saved position is for other rows or another order."""
    saved, now = state.order | {"rows": state.share.total}, layout.order.terms() | {"rows": layout.epoch.total}
    changed = [
        f"{name} was {saved.get(name)} and is {value}" for name, value in now.items() if saved.get(name) != value
    ]
    if changed:
        raise InputError(
            "The position does not fit the data: " + ", ".join(changed) + ". Resume with the data and the order of the "
            "checkpoint, or start a new run."
        )
    if not all(first <= end <= layout.order.rows for _, first, end in state.position.spans):
        raise InputError(f"The position is damaged: {state.position!r:.500}")
