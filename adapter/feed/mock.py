"""Feeds over batches that somebody else makes: a list, a data loader, any iterable."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..contract.exceptions import InputError

__all__ = ["IterableFeed", "MockBatches"]


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
    """A list makes nobody wait."""

    def check(self) -> None:
        """Nothing can be wrong with a list."""

    def __len__(self) -> int:
        return len(self._batches) // self._world_size

    def __iter__(self) -> Iterator[Any]:
        start = self._next if self._fresh else 0
        for place in range(start, len(self._batches) - self._world_size + 1, self._world_size):
            self._next, self._fresh = place + self._world_size, False
            yield self._batches[place + self._rank]

    def __getitem__(self, step: int) -> Any:
        """The batch of this rank in a step."""
        return self._batches[range(self._rank, len(self) * self._world_size, self._world_size)[step]]

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
        self._next, self._fresh = _taken(state, len(self) * self._world_size), True

    def close(self) -> None:
        """Nothing is open."""


class IterableFeed:
    """Any iterable of batches, a `torch` data loader or an object with ``iter_batches()``, one pass per iteration.

    The source hands out what this rank is to train; sharing it among ranks is the source's own affair. Where the source
    has ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``), the position is kept by it. Else it
    is the number of batches taken, and a resume reads and drops as many, which a warning says.

    Args:
        source: The iterable. A one-shot iterator serves one iteration.
        resumable: Whether dropping batches on resume gives the rest of the same sequence; False refuses to resume.
    """

    def __init__(self, source: Any, *, resumable: bool = True) -> None:
        if not hasattr(source, "iter_batches") and not isinstance(source, Iterable):
            raise TypeError(
                f"Invalid `source`. Expected an iterable or an object with iter_batches(), but received {source!r}."
            )
        self._source, self._resumable = source, resumable
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._taken = 0
        self._fresh = True
        self.wait_seconds = 0.0

    def check(self) -> None:
        """An iterable tells nothing before it is read."""

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        skip = self._taken if self._fresh and not self._stateful else 0
        if not self._fresh:
            self._taken = 0
        iterator = self._batches()
        for _ in range(skip):
            next(iterator, None)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.wait_seconds += time.perf_counter() - start
            self._taken, self._fresh = self._taken + 1, False
            yield batch

    def _batches(self) -> Iterator[Any]:
        return iter(self._source.iter_batches() if hasattr(self._source, "iter_batches") else self._source)

    def iter_batches(self) -> Iterator[Any]:
        """The same as iterating."""
        return iter(self)

    def state_dict(self) -> dict[str, Any]:
        """The source's own state where it has one, and the number of batches taken."""
        state: dict[str, Any] = {"version": 1, "taken": self._taken}
        return {**state, "source": self._source.state_dict()} if self._stateful else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that were taken.

        Raises:
            InputError: The source cannot be resumed, or the position is of another kind of source.
        """
        length = None if self._stateful or not hasattr(self._source, "__len__") else len(self._source)
        self._taken, self._fresh = _taken(state, length), True
        if self._stateful:
            self._source.load_state_dict(state["source"])
        elif self._taken and not self._resumable:
            raise InputError("The source of batches has no position; it cannot go on where the checkpoint stopped.")
        elif self._taken:
            warnings.warn(
                f"The source of batches has no position: {self._taken} batches are read and dropped to resume. Give it "
                "state_dict() and load_state_dict(), or use an ArrowFeed.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the source where it can be closed."""
        if hasattr(self._source, "close"):
            self._source.close()


def _taken(state: Mapping[str, Any], length: int | None) -> int:
    """How much of a pass was taken; of one that was taken whole, nothing of the next.

    A loader that knows its length is not asked for its end, so that the position of a whole pass is also the one from
    which the next pass begins.
    """
    if "taken" not in state:
        raise InputError(f"The position is of another kind of source; it has {', '.join(sorted(state))}.")
    taken = int(state["taken"])
    return 0 if length is not None and taken >= length else taken
