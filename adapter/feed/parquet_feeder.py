"""Feeds from a job spec, and the feeder that classes of the older runtime import."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from ..contract.types import ArrowFeedConfig
from .arrow_feed import ArrowFeed

__all__ = ["ParquetArrowBatchFeeder", "build_feed"]

_OPTIONS = (
    "batch_size",
    "readahead",
    "columns",
    "filters",
    "shuffle",
    "seed",
    "epochs",
    "drop_last",
    "shard",
    "shuffle_window",
    "readahead_bytes",
)


def build_feed(dataset: Mapping[str, Any], *, rank: int = 0, world_size: int = 1, **options: Any) -> ArrowFeed:
    """The feed that the ``dataset`` block of a job spec describes; without ``epochs`` it repeats without end.

    Args:
        dataset: ``parquet_paths`` and any argument of `ArrowFeed` that a job may set; a key with null is as if absent.
        rank: Which share is ours.
        world_size: Number of shares.
        options: Further arguments of `ArrowFeed`.

    Raises:
        ValueError: A key is unknown or a value out of range.
    """
    unknown = sorted(set(dataset) - {"parquet_paths", *_OPTIONS})
    if unknown:
        raise ValueError(
            f"Invalid `dataset`. Expected parquet_paths and {', '.join(_OPTIONS)}, but received {unknown}."
        )
    chosen = {name: dataset[name] for name in _OPTIONS if dataset.get(name) is not None}
    return ArrowFeed(dataset.get("parquet_paths") or (), rank=rank, world_size=world_size, **chosen, **options)


class ParquetArrowBatchFeeder:
    """One pass over Parquet files in order, as record batches.

    Args:
        parquet_paths: One or many paths.
        config: Batch size, readahead and columns.
    """

    def __init__(
        self,
        parquet_paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        config: ArrowFeedConfig | None = None,
    ) -> None:
        config = config or ArrowFeedConfig()
        self.config = config
        self._feed = ArrowFeed(
            parquet_paths, batch_size=config.batch_size, readahead=config.readahead, columns=config.columns, epochs=1
        )

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """All batches, from the first row; each call starts anew."""
        return iter(self._feed)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.iter_batches()
