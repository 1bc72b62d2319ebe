"""Where a feed stands: plain data for a checkpoint, equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from ..contract.exceptions import InputError
from .epoch_order import Order
from .row_plan import Share, Span, cut

__all__ = ["Layout", "Position"]

_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Layout:
    """In which order the rows come, and how they are shared: everything that a position depends on."""

    order: Order
    epoch: Share
    """The plan of a whole epoch."""

    def share(self, rows: int) -> Share:
        """The plan for `rows` rows that are left."""
        return replace(self.epoch, total=rows)


class Position(msgspec.Struct, frozen=True):
    """After `step` steps over `spans`, of which the last belongs to `epoch`.

    `spans` is a whole epoch unless the number of ranks, the batch size or the sharding changed in its middle: then it
    is what was left of the epoch at the change. Rows that the steps of this pass cannot hand out (too few for the
    ranks, see `Share`) come before the rows of the next epoch; with ``drop_last`` they are dropped.
    """

    epoch: _Count
    spans: tuple[tuple[_Count, _Count, _Count], ...]
    step: _Count = 0
    before: _Count = 0
    """Steps of the epoch that were taken before the change; a loop may count on from there."""

    @classmethod
    def start_of(cls, epoch: int, order: Order) -> Position:
        """Before the first row of `epoch`."""
        return cls(epoch, ((epoch, 0, order.rows),))

    @property
    def rows(self) -> int:
        """Rows of the spans."""
        return sum(end - first for _, first, end in self.spans)

    def following(self, layout: Layout) -> Position:
        """The start of the next pass."""
        whole = (self.epoch + 1, 0, layout.order.rows)
        return Position(self.epoch + 1, (*self.left_over(layout), whole))

    def normalized(self, layout: Layout) -> Position:
        """The same place; the end of a pass becomes the start of the next one."""
        return self if self.step < layout.share(self.rows).steps else self.following(layout)

    def left_over(self, layout: Layout) -> list[Span]:
        """Rows that the steps of this pass do not hand out, and those of the next one do."""
        share = layout.share(self.rows)
        return [] if share.drop_last else cut(self.spans, [(share.usable, share.total)])

    def state(self, layout: Layout) -> dict[str, Any]:
        """Everything needed to go on, as JSON values."""
        state = _State(version=1, position=self, share=layout.epoch, order=layout.order.terms())
        found: dict[str, Any] = msgspec.to_builtins(state)
        return found

    @classmethod
    def restored(cls, state: Mapping[str, Any], layout: Layout) -> Position:
        """The position that `state` describes, in terms of `layout`.

        Under another number of ranks, batch size or sharding the rest of the epoch is divided again.

        Raises:
            InputError: The state is damaged or of another kind of source, or the rows, or their order, are others.
        """
        try:
            found = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise InputError(f"The position is damaged, or that of another kind of source: {error}.") from None
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
    """A position in a checkpoint, with what it depends on."""

    version: Literal[1]
    position: Position
    share: Share
    order: dict[str, int]


def _require_same_rows(state: _State, layout: Layout) -> None:
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
