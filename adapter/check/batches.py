"""The raw batches of a job, as one process has them, and cut in two for as many ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa

from ..contract.types import StepContext
from ..job.config import RunConfig
from ..job.lightning_objects import epochs_of, make_data
from ..module.plugin_loading import loader_of_class, optional_hook

__all__ = ["NO_DATA", "halves", "job_batches"]


NO_DATA = "The job names no data: add `dataset.parquet_paths`, `data` or `mock_batches`."
"""The message where a class needs some."""


class _OneRank:
    """The attributes that our data modules ask of their trainer."""

    global_rank, world_size = 0, 1


def job_batches(
    config: RunConfig, plugin: Any, ctx: StepContext, stack: ExitStack, *, parquet_paths: Sequence[str] = ()
) -> tuple[StepContext, Iterator[Any] | None]:
    """The raw batches of a job as one process has them, step by step; None where it names none.

    Args:
        config: The job.
        plugin: The trainer, whose ``train_loader`` is asked once the first batch is; None where there is only the job.
        ctx: Of a training that the data is not attached to.
        stack: Closes what is opened.
        parquet_paths: Data files that the job's inputs brought here; otherwise those that it names.

    Returns:
        The context with its ``dataset``, and the batches.

    Raises:
        InputError: The data cannot be read.
    """
    data, epochs = make_data(config, parquet_paths), epochs_of(config)
    if data is not None:
        feed = _feed_of(data, ctx, stack)
        return replace(ctx, dataset=feed), _repeated(lambda: feed, epochs)
    if optional_hook(plugin, "rollout") is not None or optional_hook(plugin, "train_loader") is None:
        return ctx, None
    return ctx, _repeated(lambda: loader_of_class(plugin, ctx), epochs)


def _feed_of(data: pl.LightningDataModule, ctx: StepContext, stack: ExitStack) -> Any:
    """The batches of a training of one rank that `data` is not attached to; closed with `stack`."""
    data.trainer = _OneRank()  # type: ignore[assignment]
    stack.callback(data.teardown, "fit")
    data.setup("fit")
    if hasattr(data, "use_context"):
        data.use_context(ctx)
    return data.train_dataloader()


def _repeated(make_feed: Callable[[], Iterable[Any]], epochs: int) -> Iterator[Any]:
    """The raw batches of a feed, made with the first one, in so many epochs; -1 epochs are without end."""
    feed, done, is_empty = make_feed(), 0, False
    while done != epochs and not is_empty:
        is_empty = True
        for batch in feed:
            is_empty = False
            # A class may change the raw batch that it is given; the run gets it as it was.
            yield batch if isinstance(batch, pa.RecordBatch | pa.Table) else copy.deepcopy(batch)
        done += 1


def halves(batch: Any) -> tuple[Any, Any] | None:
    """The first and the second half of the rows of a raw batch, or None where it has no rows that can be told apart.

    Arrow tables and batches, tensors, arrays, lists of rows, and mappings of columns are cut; an odd row is left out.
    """
    middle = _rows(batch) // 2
    return (_cut(batch, 0, middle), _cut(batch, middle, middle)) if middle else None


def _rows(batch: Any) -> int:
    """How many rows a raw batch has; 0 where they cannot be told apart."""
    if isinstance(batch, Mapping):
        counts = {_rows(column) for column in batch.values()}
        return counts.pop() if len(counts) == 1 else 0
    if hasattr(batch, "num_rows"):
        return int(batch.num_rows)
    if getattr(batch, "shape", None):
        return int(batch.shape[0])
    return len(batch) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else 0


def _cut(batch: Any, start: int, length: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _cut(column, start, length) for name, column in batch.items()}
    return batch.slice(start, length) if hasattr(batch, "num_rows") else batch[start : start + length]
