"""The raw batches of a job in one process: how to get them, describe them, and take some of their rows."""

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
from ..plumbing.text import list_first
from .finding import Finding

NO_DATA = "The job names no data: add `dataset.parquet_paths`, `data` or `mock_batches`."
"""The message for a class that needs data."""


class _OneRank:
    """Stands in for the Lightning trainer: it has only the attributes that our data modules read."""

    global_rank, world_size = 0, 1


def job_batches(
    config: RunConfig, plugin: Any, ctx: StepContext, stack: ExitStack, *, parquet_paths: Sequence[str] = ()
) -> tuple[StepContext, Iterator[Any] | None]:
    """Return the context with the data of a job, and its raw batches in one process, step by step.

    Args:
        config: The job.
        plugin: The trainer; its ``train_loader`` is called when the first batch is read. None uses only the job's data.
        ctx: The context of the training, still without its ``dataset``.
        stack: Closes the data at its end.
        parquet_paths: Local copies of the data files; empty uses the paths of the job.

    Returns:
        The context with its ``dataset``, and the batches; None instead of the batches if the job has no data.

    Raises:
        InputError: The data cannot be read.
    """
    data, epochs = make_data(config, parquet_paths), epochs_of(config)
    if data is not None:
        feed = _feed_of(data, ctx, stack)
        return replace(ctx, dataset=feed), _repeat(lambda: feed, epochs)
    if optional_hook(plugin, "rollout") is not None or optional_hook(plugin, "train_loader") is None:
        return ctx, None
    return ctx, _repeat(lambda: loader_of_class(plugin, ctx), epochs)


def _feed_of(data: pl.LightningDataModule, ctx: StepContext, stack: ExitStack) -> Any:
    """Return the training batches of `data` for one rank, without a trainer; `stack` closes them."""
    data.trainer = _OneRank()  # type: ignore[assignment]
    stack.callback(data.teardown, "fit")
    data.setup("fit")
    if hasattr(data, "use_context"):
        data.use_context(ctx)
    return data.train_dataloader()


def _repeat(make_feed: Callable[[], Iterable[Any]], epochs: int) -> Iterator[Any]:
    """Yield the raw batches of a feed for `epochs` epochs, without end for -1. The first `next` makes the feed."""
    feed, done, is_empty = make_feed(), 0, False
    while done != epochs and not is_empty:
        is_empty = True
        for batch in feed:
            is_empty = False
            # A class may change a raw batch in place, and a feed may yield the same object again.
            yield batch if isinstance(batch, pa.RecordBatch | pa.Table) else copy.deepcopy(batch)
        done += 1


def halves(batch: Any) -> tuple[Any, Any] | None:
    """Return both halves of the rows of a raw batch, or None if its rows cannot be counted.

    Works for Arrow tables and batches, tensors, arrays, lists of rows, and lists and mappings of columns. An odd last
    row is dropped.
    """
    middle = count_rows(batch) // 2
    return (take_rows(batch, range(middle)), take_rows(batch, range(middle, 2 * middle))) if middle else None


def count_rows(batch: Any) -> int:
    """Return the number of rows of a raw batch; 0 if they cannot be counted."""
    if isinstance(batch, Mapping):
        counts = {count_rows(column) for column in batch.values()}
        return counts.pop() if len(counts) == 1 else 0
    if _has_columns(batch):
        return count_rows(dict(enumerate(batch)))
    if hasattr(batch, "num_rows"):
        return int(batch.num_rows)
    if getattr(batch, "shape", None):
        return int(batch.shape[0])
    return len(batch) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else 0


def _has_columns(batch: Any) -> bool:
    """Whether a batch is a list of columns, as a ``DataLoader`` makes it of rows with several tensors."""
    is_list = isinstance(batch, list | tuple) and bool(batch)
    return is_list and all(getattr(each, "ndim", 0) > 0 for each in batch)


def take_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Return a raw batch with only these rows of `batch`; `count_rows` must be able to count its rows."""
    if isinstance(batch, Mapping):
        return {name: take_rows(column, rows) for name, column in batch.items()}
    if _has_columns(batch):
        return [take_rows(column, rows) for column in batch]
    if hasattr(batch, "num_rows"):
        return batch.take(pa.array(rows, pa.int64()))
    return batch[list(rows)] if hasattr(batch, "shape") else [batch[row] for row in rows]


def describe_batch(batch: Any) -> str:
    """Return the type and the shape of a raw batch, column by column if it has columns."""
    name = type(batch).__name__
    if isinstance(batch, pa.RecordBatch | pa.Table):
        columns = [f"{field.name} {field.type}" for field in batch.schema]
        return f"{name} of {batch.num_rows} rows: {list_first(columns)}"
    if hasattr(batch, "dtype") and hasattr(batch, "shape"):
        return f"{name} {tuple(batch.shape)} {batch.dtype}"
    if isinstance(batch, Mapping):
        return f"{name}: {list_first([f'{key} {describe_batch(value)}' for key, value in batch.items()])}"
    if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], int | float | str):
        return f"{name} of {len(batch)}: {list_first([describe_batch(value) for value in batch[:3]])}"
    return f"{name}{f' of {len(batch)}' if isinstance(batch, list | tuple) else ''}"


def check_columns(batch: Any) -> Iterator[Finding]:
    """Yield findings about columns that cannot become tensors without a conversion."""
    if not isinstance(batch, pa.RecordBatch | pa.Table):
        return
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    counts = {name: column.null_count for name, column in columns.items() if column.null_count}
    nulls = [f"{name!r} ({count} of {batch.num_rows})" for name, count in counts.items()]
    texts = [repr(name) for name, column in columns.items() if pa.types.is_string(column.type)]
    if nulls:
        remedy = "fill them, or remove these rows from the files"
        yield Finding("batch", "warn", f"nulls in column {list_first(nulls)}: {remedy}")
    if texts:
        yield Finding("batch", "pass", f"text in column {list_first(texts)}: `prepare_batch` must convert it")
