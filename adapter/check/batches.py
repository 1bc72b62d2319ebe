"""The raw batches of a job: as one process would have those of all ranks, and cut in two for as many ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..contract.exceptions import ContractError, InputError
from ..contract.types import StepContext
from ..job.config import RunConfig
from ..job.lightning_objects import epochs_of, make_data
from ..module.plugin_loading import loader_of_class, optional_hook
from ..plumbing.devices import isolated_random_numbers

__all__ = ["halves", "job_batches", "joined", "rank_feed"]


@dataclass(frozen=True)
class _Rank:
    """What our data modules ask of their trainer."""

    global_rank: int
    world_size: int


def job_batches(
    config: RunConfig,
    plugin: Any,
    ctx: StepContext,
    stack: ExitStack,
    *,
    world_size: int = 1,
    parquet_paths: Sequence[str] = (),
) -> tuple[StepContext, Iterator[Any] | None]:
    """The raw batches of a job as one process would have them, step by step; None where the class collects its own.

    Args:
        config: The job.
        plugin: The trainer, whose ``train_loader`` is asked once the first batch is; None where there is only the job.
        ctx: Of a training that the data is not attached to.
        stack: Closes what is opened.
        world_size: Ranks of the job, whose rows of a step are put together.
        parquet_paths: Data files that the job's inputs brought here; otherwise those that it names.

    Returns:
        The context with its ``dataset``, and the batches.

    Raises:
        ContractError: The class collects its own batches, on several ranks; or, with the first batch, those of several
            ranks cannot be put together.
        InputError: The job names no data, or it cannot be read.
    """
    make = partial(make_data, config, parquet_paths)
    if make() is not None:
        feeds = _rank_feeds(make, ctx, world_size, stack)
        return replace(ctx, dataset=feeds[0]), _joined_batches(lambda: feeds, epochs=epochs_of(config))
    if optional_hook(plugin, "rollout") is not None:
        if world_size > 1:
            raise ContractError(
                "A class with `rollout` collects other batches on each rank, and one plain loop cannot have them. "
                "Compare on one device: --set lightning.devices=1"
            )
        return ctx, None
    if optional_hook(plugin, "train_loader") is None:
        raise InputError("The job names no data: add `dataset.parquet_paths`, `data` or `mock_batches`.")
    ranks = [replace(ctx, rank=rank, world_size=world_size) for rank in range(world_size)]
    loaders = partial(map, partial(loader_of_class, plugin), ranks)
    return ctx, _joined_batches(lambda: list(loaders()), epochs=epochs_of(config))


def rank_feed(data: pl.LightningDataModule, ctx: StepContext, stack: ExitStack) -> Any:
    """What feeds the rank of `ctx` in a training that `data` is not attached to; closed with `stack`."""
    data.trainer = _Rank(ctx.rank, ctx.world_size)  # type: ignore[assignment]
    stack.callback(data.teardown, "fit")
    data.setup("fit")
    if hasattr(data, "use_context"):
        data.use_context(ctx)
    return data.train_dataloader()


def _rank_feeds(
    make: Callable[[], pl.LightningDataModule | None], ctx: StepContext, world_size: int, stack: ExitStack
) -> list[Any]:
    """What feeds each rank, each of a data module of its own.

    Random numbers are afterwards as if only rank zero had made its own.
    """
    feeds: list[Any] = []
    for rank in reversed(range(world_size)):
        data = make()
        assert data is not None
        with isolated_random_numbers() if rank else nullcontext():
            feeds.insert(0, rank_feed(data, replace(ctx, rank=rank, world_size=world_size), stack))
    return feeds


def _joined_batches(make_feeds: Callable[[], Sequence[Any]], *, epochs: int) -> Iterator[Any]:
    """The rows of a step of all ranks together, in the order of ranks; -1 epochs are without end."""
    feeds, done, is_empty = make_feeds(), 0, False
    while done != epochs and not is_empty:
        is_empty = True
        for batches in zip(*feeds, strict=False):
            is_empty = False
            # A class may change the raw batch that it is given; the run gets it as it was.
            is_mutable = not isinstance(batches[0], pa.RecordBatch | pa.Table)
            yield joined(copy.deepcopy(list(batches)) if is_mutable else batches)
        done += 1


def joined(batches: Sequence[Any]) -> Any:
    """The rows of several raw batches as one: Arrow data, tensors, arrays, lists of rows, mappings of columns.

    Raises:
        ContractError: They are of another type, or of several.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, pa.RecordBatch):
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    if isinstance(first, pa.Table):
        return pa.concat_tables(batches)
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, np.ndarray):
        return np.concatenate(list(batches))
    if isinstance(first, Mapping):
        return {name: joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list):
        return [row for batch in batches for row in batch]
    raise ContractError(
        f"The raw batches of {len(batches)} ranks are of type {type(first).__qualname__}, which cannot be put together "
        "for one plain loop. Give lists of rows, mappings of columns, tensors, arrays or Arrow data, or compare on one "
        "device: --set lightning.devices=1"
    )


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
