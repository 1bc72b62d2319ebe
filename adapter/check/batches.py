"""The raw batches of all ranks of a job, step by step, as one process would have them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..contract.exceptions import ContractError
from ..contract.types import StepContext
from ..plumbing.devices import isolated_random_numbers

__all__ = ["joined", "joined_batches", "rank_feed", "rank_feeds"]


@dataclass(frozen=True)
class _Rank:
    """What our data modules ask of their trainer."""

    global_rank: int
    world_size: int


def joined_batches(make_feeds: Callable[[], Sequence[Any]], *, epochs: int) -> Iterator[Any]:
    """The rows of a step of all ranks together, in the order of ranks.

    Args:
        make_feeds: Gives what feeds each rank, when the first batch is asked for.
        epochs: Passes over the data; -1 means no limit.

    Raises:
        ContractError: Batches of this type cannot be put together, on several ranks.
        InputError: The data cannot be read.
    """
    feeds, done = make_feeds(), 0
    while done != epochs:
        is_empty = True
        for batches in zip(*feeds, strict=False):
            is_empty = False
            # A class may change the raw batch that it is given; the run gets it as it was.
            yield joined(copy.deepcopy(list(batches)) if _is_mutable(batches[0]) else batches)
        if is_empty:
            return
        done += 1


def rank_feed(data: pl.LightningDataModule, ctx: StepContext, stack: ExitStack) -> Any:
    """What feeds the rank of `ctx` in a training that `data` is not attached to; closed with `stack`."""
    data.trainer = _Rank(ctx.rank, ctx.world_size)  # type: ignore[assignment]
    stack.callback(data.teardown, "fit")
    data.setup("fit")
    if hasattr(data, "use_context"):
        data.use_context(ctx)
    return data.train_dataloader()


def rank_feeds(
    make: Callable[[], pl.LightningDataModule | None], ctx: StepContext, world_size: int, stack: ExitStack
) -> list[Any]:
    """What feeds each rank of a training, each of a data module of its own; closed with `stack`.

    Random numbers are afterwards as if only rank zero had made its own.
    """
    feeds: list[Any] = []
    for rank in reversed(range(world_size)):
        data = make()
        assert data is not None
        with isolated_random_numbers() if rank else nullcontext():
            feeds.insert(0, rank_feed(data, replace(ctx, rank=rank, world_size=world_size), stack))
    return feeds


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


def _is_mutable(batch: Any) -> bool:
    return not isinstance(batch, pa.RecordBatch | pa.Table)
