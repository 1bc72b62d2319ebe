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
    from .mock import MockBatches
    from .parquet_feeder import ParquetArrowBatchFeeder
    from .sources import Source
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".arrow_feed": ("ArrowFeed",),
            ".parquet_feeder": ("ParquetArrowBatchFeeder",),
            ".collate": ("to_torch",),
            ".data_module": ("ArrowDataModule",),
            ".mock": ("MockBatches",),
            ".ledger": ("Ledger", "trained_rows"),
            ".sources": ("Source",),
        },
    )

__all__ = [
    "ArrowDataModule",
    "ArrowFeed",
    "Ledger",
    "MockBatches",
    "ParquetArrowBatchFeeder",
    "Source",
    "to_torch",
    "trained_rows",
]
