"""A map-style dataset as the source of a feed: rows in the feed's order, made into batches by torch's loader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from .batching import CLOSED, Spec
from .epoch_order import Order
from .position import Position
from .workers import draw_from, entropy_of, started

__all__ = ["DatasetSource"]


class DatasetSource:
    """Rows of a dataset with ``__getitem__`` and ``__len__``, all of them shuffled among each other.

    Args:
        dataset: Where workers are asked for, it is sent to them; it may have ``__getitems__``, which gets a list.
    """

    schema = pa.schema([])
    row_bytes = 0.0
    fingerprint = "dataset"
    """The number of rows is part of each position; what is in them only the user knows."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.group_rows = (len(dataset),)

    def supply(self, spec: Spec, position: Position, workers: int) -> _DatasetSupply:
        """What hands out batches from `position` on."""
        return _DatasetSupply(self.dataset, spec, position, workers)

    def close(self) -> None:
        """Nothing is open."""


class _DatasetSupply:
    """See `Supply`. Worker processes, where there are some, are started for each epoch."""

    def __init__(self, dataset: Any, spec: Spec, position: Position, workers: int) -> None:
        self.position: Position | None = position
        self.wait_seconds = 0.0
        self._rows = _Rows(dataset)
        self._spec = replace(spec, source=None)  # type: ignore[arg-type]
        self._workers = workers
        self._batches: Iterator[Any] = iter(())
        self._closed = False

    def epoch(self) -> Iterator[Any]:
        """See `Supply`."""
        assert self.position is not None
        position, layout, self.position = self.position, self._spec.layout, None
        loader: DataLoader[Any] = DataLoader(
            self._rows,
            batch_sampler=self._drawn(position),  # type: ignore[arg-type]
            num_workers=self._workers,
            collate_fn=self._spec.collate,
            # A generator of its own: the default would draw from the training process's random numbers.
            generator=torch.Generator().manual_seed(layout.order.seed),
        )
        self._batches = started(loader)
        for _ in range(position.step, layout.share(position.rows).steps):
            start = time.perf_counter()
            batch = next(self._batches)
            self.wait_seconds += time.perf_counter() - start
            yield batch
            if self._closed:
                raise RuntimeError(CLOSED)
        self.position = position.following(layout)

    def _drawn(self, position: Position) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """For each step what random numbers of workers depend on, and the rows of our rank."""
        share = self._spec.layout.share(position.rows)
        rows = np.concatenate([_rows_of(self._spec.layout.order, *span) for span in position.spans])
        for step in range(position.step, share.steps):
            first, end = share.interval(step, self._spec.rank)
            yield entropy_of(self._spec, position, step), rows[first:end].tolist()

    def close(self) -> None:
        """See `Supply`."""
        getattr(self._batches, "_shutdown_workers", lambda: None)()
        self._batches = iter(())
        self._closed = True


def _rows_of(order: Order, epoch: int, first: int, end: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    rows = order.window_permutation(epoch, 0, 0, order.rows) if order.shuffle else np.arange(order.rows)
    return rows[first:end]


class _Rows(Dataset[Any]):
    """The rows of a batch, drawn in a worker from random numbers that neither a resume nor other workers change."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, drawn: tuple[tuple[int, ...], list[int]]) -> list[Any]:
        entropy, rows = drawn
        if get_worker_info() is not None:
            draw_from(entropy)
        fetch = getattr(self._dataset, "__getitems__", None)
        found: list[Any] = fetch(rows) if callable(fetch) else [self._dataset[row] for row in rows]
        return found
