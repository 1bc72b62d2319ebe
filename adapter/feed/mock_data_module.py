"""Batches that stand in the job itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from . import MockBatches

__all__ = ["MockDataModule"]


class MockDataModule(LightningDataModule):
    """A list of batches, one pass, shared among the ranks.

    Args:
        batches: Raw batches as the trainer's ``prepare_batch`` takes them.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self._batches = batches
        self._feed: MockBatches | None = None

    @override
    def train_dataloader(self) -> MockBatches:
        """The batches of this rank; the same object all along, because it carries the position."""
        if self._feed is None:
            rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
            self._feed = MockBatches(self._batches, rank=rank, world_size=world_size)
        return self._feed

    @property
    def feed(self) -> MockBatches:
        """What feeds the run."""
        return self.train_dataloader()
