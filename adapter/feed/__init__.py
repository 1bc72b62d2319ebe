"""Arrow batches from files, tables and iterables: sharded over ranks, prefetched, with an exact position.

The names below are resolved on first use; importing this package imports neither torch nor Lightning nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrow_feed import ArrowFeed
    from .build import ParquetArrowBatchFeeder, build_feed
    from .collate import to_torch
    from .data_module import ArrowDataModule
    from .iterables import IterableFeed, MockBatches
    from .ledger import Ledger, trained_rows
    from .resolve import BatchFeed, as_feed
    from .sources import Source

_HOME = {
    "ArrowDataModule": ".data_module",
    "ArrowFeed": ".arrow_feed",
    "IterableFeed": ".iterables",
    "MockBatches": ".iterables",
    "ParquetArrowBatchFeeder": ".build",
    "BatchFeed": ".resolve",
    "Ledger": ".ledger",
    "Source": ".sources",
    "as_feed": ".resolve",
    "build_feed": ".build",
    "to_torch": ".collate",
    "trained_rows": ".ledger",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
