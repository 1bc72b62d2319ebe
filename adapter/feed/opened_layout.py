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
    share = layout.share(layout.order.rows)
    rest = share.total % share.step_rows
    if options.rank or options.drop_last or not rest:
        return
    ranks = f" of {options.world_size} ranks" if options.world_size > 1 else ""
    if not share.full_steps and share.steps == 1:
        log.warning(
            "the data has %d rows, fewer than the %d of a step%s: each step has them all, and is an epoch%s",
            share.total,
            share.step_rows,
            ranks,
            _uneven([share.total], options.world_size),
        )
        return
    if share.usable < share.total:
        log.info(
            "%d rows of each epoch are too few for %d ranks: they come before the rows of the next epoch",
            rest,
            options.world_size,
        )
        return
    short = [share.consumed(step + 1) - share.consumed(step) for step in range(share.full_steps, share.steps)]
    log.info(
        "the last %s, the others %d%s%s; `drop_last` leaves out the last %d",
        f"step of each epoch has {short[0]} rows"
        if len(short) == 1
        else "steps of each epoch have {} and {} rows".format(*short),
        share.step_rows,
        ranks,
        _uneven(short, options.world_size),
        rest,
    )


def _uneven(steps: list[int], world_size: int) -> str:
    """What rows a step cannot share evenly mean for averages over the ranks."""
    if all(rows % world_size == 0 for rows in steps):
        return ""
    return "; there some ranks have a row more, and the mean of each rank counts alike"


def _too_few(layout: Layout) -> str:
    rows = layout.order.rows
    if layout.drop_last:
        return (
            f"The data has {rows} rows, fewer than the {layout.share(0).step_rows} of a full step (`drop_last` is on)."
        )
    return f"The data has {rows} rows for {layout.world_size} ranks; every rank needs at least one."
