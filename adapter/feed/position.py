"""Where a feed stands: plain data for a checkpoint, equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..contract.exceptions import InputError
from .epoch_order import Order
from .row_plan import SHARD_MODES, Shard, Share, Span, cut

__all__ = ["Layout", "Position"]

STATE_VERSION = 1


@dataclass(frozen=True)
class Layout:
    """How the rows are shared: everything of a feed's configuration that a position depends on."""

    order: Order
    batch_size: int
    world_size: int
    shard: Shard
    drop_last: bool

    def share(self, rows: int) -> Share:
        """The plan for `rows` rows that are left."""
        return Share(rows, self.batch_size, self.world_size, self.shard, self.drop_last)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.share(self.order.rows).steps


@dataclass(frozen=True)
class Position:
    """After `step` steps over `spans`, of which the last belongs to `epoch`.

    `spans` is a whole epoch unless the number of ranks, the batch size or the sharding changed in its middle: then it
    is what was left of the epoch at the change. Rows that the steps of this pass cannot hand out (too few for the
    ranks, see `Share`) come before the rows of the next epoch; with ``drop_last`` they are dropped.
    """

    epoch: int
    spans: tuple[Span, ...]
    step: int = 0
    before: int = 0
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
        return Position(self.epoch + 1, (*self._left_over(layout), whole))

    def normalized(self, layout: Layout) -> Position:
        """The same place; the end of a pass becomes the start of the next one."""
        return self if self.step < layout.share(self.rows).steps else self.following(layout)

    def _left_over(self, layout: Layout) -> list[Span]:
        share = layout.share(self.rows)
        return [] if layout.drop_last else cut(self.spans, [(share.usable, share.total)])

    def given_up(self, layout: Layout, epochs: int | None) -> int:
        """Rows of this pass that no pass will train: too few for the ranks, at the end of the last epoch."""
        last = epochs is not None and self.epoch + 1 >= epochs
        return sum(end - first for _, first, end in self._left_over(layout)) if last else 0

    def state(self, layout: Layout) -> dict[str, Any]:
        """Everything needed to go on, as JSON values."""
        order = layout.order
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "spans": [list(span) for span in self.spans],
            "before": self.before,
            "rows": order.rows,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "window": order.window if order.shuffle else 0,
            "batch_size": layout.batch_size,
            "world_size": layout.world_size,
            "shard": layout.shard,
            "drop_last": layout.drop_last,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], layout: Layout) -> Position:
        """The position that `state` describes, in terms of `layout`.

        Under another number of ranks, batch size or sharding the rest of the epoch is divided again.

        Raises:
            InputError: The rows, or their order, are not those of the state.
        """
        _require_same_order(state, layout.order)
        saved, old = _saved(state, layout)
        before = saved.before + saved.step
        if saved.step and saved.step >= old.share(saved.rows).steps:
            return replace(saved.following(old), before=0 if old == layout else before)
        if old == layout:
            return saved
        rest = tuple(cut(saved.spans, old.share(saved.rows).rest(saved.step)))
        return cls(saved.epoch, rest, before=before)


def _saved(state: Mapping[str, Any], layout: Layout) -> tuple[Position, Layout]:
    """The position as it was saved, and in which terms."""
    try:
        spans = tuple((int(epoch), int(first), int(end)) for epoch, first, end in state["spans"])
        saved = Position(int(state["epoch"]), spans, int(state["step"]), int(state.get("before", 0)))
        old = replace(
            layout,
            batch_size=int(state["batch_size"]),
            world_size=int(state["world_size"]),
            shard=state["shard"],
            drop_last=bool(state["drop_last"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"The position is damaged ({type(error).__name__}: {error}): {dict(state)!r:.500}") from error
    within = all(epoch >= 0 and 0 <= first <= end <= layout.order.rows for epoch, first, end in spans)
    if not within or saved.step < 0 or min(old.batch_size, old.world_size) < 1 or old.shard not in SHARD_MODES:
        raise InputError(f"The position is damaged: {dict(state)!r:.500}")
    return saved, old


def _require_same_order(state: Mapping[str, Any], order: Order) -> None:
    if state.get("version") != STATE_VERSION:
        raise InputError(f"The position has version {state.get('version')!r}; this release reads {STATE_VERSION}.")
    if "spans" not in state:
        raise InputError(f"The position belongs to another kind of source; it has {', '.join(sorted(state))}.")
    now = {"rows": order.rows, "seed": order.seed, "shuffle": order.shuffle}
    if order.shuffle:
        now["window"] = order.window
    changed = [
        f"{name} was {state.get(name)} and is {value}" for name, value in now.items() if state.get(name) != value
    ]
    if changed:
        raise InputError(
            "The position does not fit the data: " + ", ".join(changed) + ". Resume with the data and the order of the "
            "checkpoint, or start a new run."
        )
