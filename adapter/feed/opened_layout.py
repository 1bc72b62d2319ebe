"""How the rows of an opened source become steps, and what is said where these are not as asked."""

from __future__ import annotations

import logging

from ..contract.exceptions import InputError
from .epoch_order import Order
from .options import FeedOptions
from .position import Layout
from .sources import Source

__all__ = ["layout_of", "say_short_batches"]

log = logging.getLogger(__name__)


def layout_of(source: Source, options: FeedOptions) -> Layout:
    """How the steps of an epoch share the rows of `source`.

    Raises:
        InputError: There are too few for a step.
    """
    order = Order(source.group_rows, options.seed, options.shuffle, options.shuffle_window)
    layout = Layout(order, options.batch_size, options.world_size, options.shard, options.drop_last)
    if not layout.steps_per_epoch:
        raise InputError(_too_few(layout))
    return layout


def say_short_batches(layout: Layout, options: FeedOptions) -> None:
    """Say where the batch size that was asked for is not the one that is trained with."""
    rows, step_rows = layout.order.rows, layout.share(0).step_rows
    if options.rank or options.drop_last or rows % step_rows == 0:
        return
    ranks = f" of {options.world_size} ranks" if options.world_size > 1 else ""
    if rows < step_rows:
        log.warning(
            "the data has %d rows, fewer than the %d of a step%s: each step has them all, and is an epoch",
            rows,
            step_rows,
            ranks,
        )
    else:
        log.info(
            "the last step of each epoch has %d rows, the others %d%s; `drop_last` leaves it out",
            rows % step_rows,
            step_rows,
            ranks,
        )


def _too_few(layout: Layout) -> str:
    rows = layout.order.rows
    if layout.drop_last:
        return (
            f"The data has {rows} rows, fewer than the {layout.share(0).step_rows} of a full step (`drop_last` is on)."
        )
    return f"The data has {rows} rows for {layout.world_size} ranks; every rank needs at least one."
