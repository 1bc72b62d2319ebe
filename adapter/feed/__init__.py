"""Arrow batches from files, tables and iterables: sharded over ranks, prefetched, with an exact position.

The names below are resolved on first use; importing this package imports neither torch nor Lightning nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .arrow_feed import ArrowFeed
    from .collate import to_torch
    from .data_module import ArrowDataModule
    from .ledger import Ledger, trained_rows
    from .mock import IterableFeed, MockBatches
    from .open_source import BatchFeed, as_feed
    from .parquet_feeder import ParquetArrowBatchFeeder, build_feed
    from .sources import Source
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".arrow_feed": ("ArrowFeed",),
            ".parquet_feeder": ("ParquetArrowBatchFeeder", "build_feed"),
            ".collate": ("to_torch",),
            ".data_module": ("ArrowDataModule",),
            ".mock": ("IterableFeed", "MockBatches"),
            ".ledger": ("Ledger", "trained_rows"),
            ".open_source": ("BatchFeed", "as_feed"),
            ".sources": ("Source",),
        },
    )

__all__ = [
    "ArrowDataModule",
    "ArrowFeed",
    "BatchFeed",
    "IterableFeed",
    "Ledger",
    "MockBatches",
    "ParquetArrowBatchFeeder",
    "Source",
    "as_feed",
    "build_feed",
    "to_torch",
    "trained_rows",
]
