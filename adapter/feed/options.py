"""The settings by which rows become batches, declared once for `ArrowFeed` and for the `dataset` of a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from ..plumbing.settings import Count, NonBlank, Positive, Rule, example
from .row_plan import Shard


def _are_different(columns: Collection[Any]) -> bool:
    return 0 < len(columns) == len({repr(column) for column in columns})


@dataclass(kw_only=True, eq=False, repr=False)
class FeedOptions:
    """Settings of a feed: order, batches and processes.

    This is a dataclass, not a struct, because `ArrowFeed` takes the fields as arguments.
    """

    batch_size: Positive = 32
    """Rows per batch, on each rank."""
    readahead: Count = 2
    """Decoded chunks of up to 32 MiB kept ready by a thread; 0 decodes in the training thread. With `workers`, each
    process keeps this many blocks of steps ready, and at least one."""
    columns: (
        Annotated[
            Sequence[NonBlank],
            Meta(min_length=1),
            Rule("a list of different column names", _are_different, way_out="Omit it to read all columns."),
            example(["image", "label"]),
        ]
        | None
    ) = None
    """Columns to read, in this order; all by default."""
    shuffle: bool = False
    """A different order in each epoch: of row groups, and of rows within `shuffle_window`."""
    seed: Count = 0
    """Seed of the order. The order depends only on it and the epoch; in a job it is the job's `seed` by default."""
    epochs: Annotated[Positive, example(3)] | None = None
    """Passes over the data; by default it repeats without end."""
    drop_last: bool = False
    """Drop the rows at the end of an epoch that do not fill a step of all ranks."""
    shard: Shard = "rows"
    """How ranks share the rows: `rows` (each step is split among them) or `row_groups` (each rank decodes its own
    part)."""
    shuffle_window: Positive = 65_536
    """Size of the window, in rows, within which rows are shuffled; they are in memory meanwhile."""
    workers: Count = 0
    """Processes that decode and collate; 0 uses the training process. Order and position are the same for any
    number. Tensors pass through `/dev/shm`; in a container it has 64 MiB by default."""
    pin_memory: bool | None = None
    """Hand out the tensors of `collate` in pinned memory, so that `.to(device, non_blocking=True)` does not wait; on by
    default if there is an accelerator."""
    # `str` comes first, because jsonargparse would otherwise save a name as an instance that cannot be serialized.
    collate: str | Callable[[Any], Any] | None = None
    """Converts record batches: `torch` gives a dictionary of tensors, lists padded with zeros and their lengths under
    `<column>_lengths`; `module:function` is yours; by default the trainer gets the record batch."""
