"""A list of batches as a feed with a position, for tests and dry runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from typing_extensions import override

from ..contract.exceptions import InputError

__all__ = ["MockBatches", "MockDataModule"]


class MockBatches:
    """A list of batches, one pass, with a position; for tests and dry runs.

    On several ranks step k takes the next `world_size` batches, one for each rank; a remainder that does not give every
    rank a batch is left out, with a warning.

    Args:
        batches: The batches, in order.
        rank: Which share is ours.
        world_size: Number of shares.

    Raises:
        InputError: There are fewer batches than ranks.
    """

    def __init__(self, batches: Sequence[Any], *, rank: int = 0, world_size: int = 1) -> None:
        self._batches = list(batches)
        self._rank, self._world_size = rank, world_size
        if len(self._batches) < world_size:
            raise InputError(
                f"{len(self._batches)} mock batches for {world_size} ranks; every rank needs at least one."
            )
        rest = len(self._batches) % world_size
        if rest:
            warnings.warn(
                f"The last {rest} mock batches are left out: {world_size} ranks cannot share them.", stacklevel=2
            )
        self._next = 0
        self._fresh = True

    wait_seconds = 0.0
    """Reading a list takes no time."""

    def __len__(self) -> int:
        return len(self._batches) // self._world_size

    def __getitem__(self, step: int) -> Any:
        """The batch of this rank in a step."""
        return self._batches[range(self._rank, len(self) * self._world_size, self._world_size)[step]]

    def __iter__(self) -> Iterator[Any]:
        start = self._next if self._fresh else 0
        for place in range(start, len(self._batches) - self._world_size + 1, self._world_size):
            self._next, self._fresh = place + self._world_size, False
            yield self._batches[place + self._rank]

    def iter_batches(self) -> Iterator[Any]:
        """The same as iterating."""
        return iter(self)

    def state_dict(self) -> dict[str, Any]:
        """How many batches all ranks together have taken."""
        return {"version": 1, "taken": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that were taken, also on another number of ranks.

        Raises:
            InputError: The position is of another kind of source.
        """
        if "taken" not in state:
            raise InputError(f"The position belongs to another kind of source; it has {', '.join(sorted(state))}.")
        # A loader that knows its length is not asked for its end: after a whole pass the next one begins.
        taken = int(state["taken"])
        self._next, self._fresh = 0 if taken >= len(self) * self._world_size else taken, True

    def close(self) -> None:
        """Nothing is open."""


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
        """The feed of the run."""
        return self.train_dataloader()
