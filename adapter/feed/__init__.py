"""Arrow batches from files, tables and iterables: sharded over ranks, prefetched, with an exact position.

The names below are resolved on first use; importing this package imports neither torch nor Lightning nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .arrow_feed import ArrowFeed as ArrowFeed, ParquetArrowBatchFeeder as ParquetArrowBatchFeeder
    from .collate import to_torch as to_torch
    from .data_module import (
        ArrowDataModule as ArrowDataModule,
        FunctionDataModule as FunctionDataModule,
        MockDataModule as MockDataModule,
    )
    from .minibatches import Minibatches as Minibatches
    from .replay_buffer import ReplayBuffer as ReplayBuffer, ReplayFeed as ReplayFeed
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
