"""Arrow batches from files, tables and iterables: sharded over ranks, prefetched, with an exact position.

The names below are resolved on first use; importing this package imports neither torch nor Lightning nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrow_feed import ArrowFeed
    from .build import ParquetArrowBatchFeeder, build_feed
    from .data_module import ArrowDataModule
    from .iterables import IterableFeed, MockBatches

_HOME = {
    "ArrowDataModule": ".data_module",
    "ArrowFeed": ".arrow_feed",
    "IterableFeed": ".iterables",
    "MockBatches": ".iterables",
    "ParquetArrowBatchFeeder": ".build",
    "build_feed": ".build",
}

__all__ = ["ArrowDataModule", "ArrowFeed", "IterableFeed", "MockBatches", "ParquetArrowBatchFeeder", "build_feed"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
