"""The feeder that classes of the older runtime import."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pyarrow as pa

from ..contract.types import ArrowFeedConfig
from .arrow_feed import ArrowFeed

__all__ = ["ParquetArrowBatchFeeder"]


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
        """All batches, from the first row; each call starts over."""
        return iter(self._feed)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.iter_batches()
