"""Batches drawn from a replay buffer while another thread writes it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..contract.exceptions import InputError
from .replay_buffer import ReplayBuffer

__all__ = ["ReplayFeed"]


class ReplayFeed:
    """A loader whose batches are samples of `buffer`; what it has drawn is in the buffer's own checkpoint.

    Args:
        buffer: Is written by another thread, or between two steps.
        batch_size: Rows of a batch.
        start_after: Rows that there must be before the first batch; None waits for `batch_size`.
        batches: Batches of a pass; None is a pass without end.
        importance_exponent: Of the weights, where the buffer has priorities.
        wait_s: How long to wait for `start_after` rows.

    Raises:
        ValueError: Arguments are out of range; lists every fault.
    """

    begins_anew = True  # a pass has no position but the buffer's
    told_on_resume = None

    def __init__(
        self,
        buffer: ReplayBuffer,
        batch_size: int,
        *,
        start_after: int | None = None,
        batches: int | None = None,
        importance_exponent: float = 0.4,
        wait_s: float = 60.0,
    ) -> None:
        needed = batch_size if start_after is None else start_after
        faults = []
        if batch_size < 1:
            faults.append(f"Invalid `batch_size`. Expected a number >= 1, but received {batch_size}")
        if not batch_size <= needed <= buffer.capacity:
            faults.append(f"Expected from {batch_size} to {buffer.capacity} rows to start after, but received {needed}")
        if batches is not None and batches < 1:
            faults.append(f"Invalid `batches`. Expected a number >= 1, but received {batches}")
        if faults:
            raise ValueError("ReplayFeed: " + "; ".join(faults))
        self.buffer, self.batch_size, self.start_after, self.batches = buffer, batch_size, needed, batches
        self.importance_exponent, self.wait_s = importance_exponent, wait_s

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self.buffer.wait_for(self.start_after, self.wait_s):
            raise InputError(
                f"the replay buffer has {len(self.buffer)} rows after {self.wait_s:g} s, and training starts after "
                f"{self.start_after}: does its writer run?"
            )
        drawn = 0
        while self.batches is None or drawn < self.batches:
            yield self.buffer.sample(self.batch_size, importance_exponent=self.importance_exponent)
            drawn += 1
