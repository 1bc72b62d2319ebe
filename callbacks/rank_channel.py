"""Messages between ranks, separate from the collectives of training.

Channels are separate gloo groups: their messages stay in host memory, wait for no device, and cannot be matched with a
collective of training that another rank issued in another order. Saves use two channels, one for the training threads
and one for the writing threads, because threads must not share a channel. When a rank dies, its connections close, and
the ranks that wait for it get an error at once.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..adapter.contract.exceptions import CheckpointError
from ..adapter.plumbing.devices import gather_objects, host_group

_Result = TypeVar("_Result")

LONGEST_WAIT = dt.timedelta(hours=1)
"""Longest time that a rank that has written its part waits for the slowest of the others."""


class Channel:
    """Messages between ranks; all ranks send them in the same order.

    Args:
        longest_wait: Time limit for an answer of another rank; None takes torch's default.
        alone: Skip all communication; for work of a single rank.
    """

    def __init__(self, longest_wait: dt.timedelta | None = None, *, alone: bool = False) -> None:
        is_alone = alone or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.rank, self.size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self._group = None if is_alone else host_group(longest_wait)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in order, on rank zero; an empty list on the others."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def gather_everywhere(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in order, on all ranks."""
        return [value] if self._group is None else gather_objects(value, self._group)

    def share(self, value: Any) -> Any:
        """Return rank zero's `value`."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def agreed(self, act: Callable[[], _Result], doing: str) -> _Result:
        """Return the result of `act` on this rank, once it has succeeded on all ranks.

        Raises:
            Exception: The error of `act` on this rank.
            CheckpointError: It failed on another rank, or that rank has ended; the message includes `doing`.
        """
        result: _Result | None = None
        problem: Exception | None = None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
            problem = error
        try:
            texts = self.gather_everywhere(None if problem is None else f"{type(problem).__name__}: {problem}")
        except RuntimeError as error:  # gloo raises this if a connection closes
            raise CheckpointError(f"a rank ended while the others were to {doing}") from problem or error
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"rank {rank} could not {doing}: {text}")
        return cast("_Result", result)

    def first(self, act: Callable[[], _Result], doing: str) -> _Result:
        """Return on all ranks the result of rank zero, the only one to call `act`; raises like `agreed`."""
        return cast("_Result", self.share(self.agreed(act if self.rank == 0 else lambda: None, doing)))

    def start_largest(self, number: int) -> tuple[torch.Tensor, Any]:
        """Begin to find the largest number of all ranks; return the tensor for it, and the work to wait for."""
        numbers = torch.tensor([number], device="cpu")
        work = None
        if self._group is not None:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return numbers, work


ALONE = Channel(alone=True)


class RankGroups:
    """The channels of one process; all ranks create theirs at the same time.

    Both are created before the first save, because creating a channel waits for every rank, even for a dead one.
    """

    def __init__(self) -> None:
        self.training = Channel()
        """Channel for the training threads."""
        self.writing = Channel(LONGEST_WAIT)
        """Channel for the writing threads, or for the training threads while nothing is written."""
