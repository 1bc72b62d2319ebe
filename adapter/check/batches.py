"""The raw batches of all ranks of a job, step by step, as one process would have them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..contract.exceptions import ContractError

__all__ = ["joined", "joined_batches", "rank_feed"]


@dataclass(frozen=True)
class _Rank:
    """What our data modules ask of their trainer."""

    global_rank: int
    world_size: int


def joined_batches(make_data: Callable[[], pl.LightningDataModule], world_size: int, *, epochs: int) -> Iterator[Any]:
    """The rows of a step of all ranks together, in the order of ranks.

    Args:
        make_data: Makes the data module of the job; once for each rank.
        world_size: Number of ranks.
        epochs: Passes over the data; -1 means no limit.

    Raises:
        ContractError: Batches of this type cannot be put together, on several ranks.
        InputError: The data cannot be read.
    """
    with ExitStack() as stack:
        feeds = [rank_feed(make_data(), rank, world_size, stack) for rank in range(world_size)]
        done = 0
        while done != epochs:
            is_empty = True
            for batches in zip(*feeds, strict=False):
                is_empty = False
                # A class may change the raw batch that it is given; the run gets it as it was.
                yield joined(copy.deepcopy(list(batches)) if _is_mutable(batches[0]) else batches)
            if is_empty:
                return
            done += 1


def rank_feed(data: pl.LightningDataModule, rank: int, world_size: int, stack: ExitStack) -> Any:
    """What feeds a rank of a training that `data` is not attached to; closed with `stack`."""
    data.trainer = _Rank(rank, world_size)  # type: ignore[assignment]
    stack.callback(data.teardown, "fit")
    data.setup("fit")
    return data.train_dataloader()


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
