"""How the ranks of a run speak about a save, beside the collectives of training.

Channels are gloo groups of their own: what is said over them stays in host memory, waits for no device, and cannot meet
a collective of training that another rank has issued in another order. One is for the training threads and one for the
threads that write, so that the two never share one either. A rank that dies closes its connections, and a rank that
waits for it gets an error at once.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ....adapter.contract.exceptions import CheckpointError
from ....adapter.plumbing.devices import gather_objects, host_group

__all__ = ["ALONE", "Channel", "RankGroups"]

_Result = TypeVar("_Result")

LONGEST_WAIT = dt.timedelta(hours=1)
"""How long a rank that has written its part waits for the slowest of the others."""


class Channel:
    """Messages between ranks, each time from all of them in the same order.

    Args:
        longest_wait: For a rank that does not answer; None takes torch's default.
        alone: For what one rank does by itself.
    """

    def __init__(self, longest_wait: dt.timedelta | None = None, *, alone: bool = False) -> None:
        is_alone = alone or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.rank, self.size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self._group = None if is_alone else host_group(longest_wait)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in order, on rank zero; an empty list elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def gather_everywhere(self, value: Any) -> list[Any]:
        """`value` of every rank, in order, on all of them."""
        return [value] if self._group is None else gather_objects(value, self._group)

    def share(self, value: Any) -> Any:
        """The `value` of rank zero."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def agreed(self, act: Callable[[], _Result], doing: str) -> _Result:
        """The result of `act` on this rank, once it has succeeded on all of them.

        Raises:
            Exception: What it raised on this rank.
            CheckpointError: It raised on another rank, or that has ended; says what it was `doing`.
        """
        result: _Result | None = None
        problem: Exception | None = None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - it is raised below, once all ranks know
            problem = error
        try:
            texts = self.gather_everywhere(None if problem is None else f"{type(problem).__name__}: {problem}")
        except RuntimeError as error:  # what gloo raises when a connection closes
            raise CheckpointError(f"a rank ended while the others were to {doing}") from problem or error
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"rank {rank} could not {doing}: {text}")
        return cast("_Result", result)

    def first(self, act: Callable[[], _Result], doing: str) -> _Result:
        """The result of `act`, which rank zero does alone, on all ranks; raises as `agreed`."""
        return cast("_Result", self.share(self.agreed(act if self.rank == 0 else lambda: None, doing)))

    def start_largest(self, number: int) -> tuple[torch.Tensor, Any]:
        """Begin to find the largest number of any rank: the tensor that will hold it, and what to wait for."""
        numbers = torch.tensor([number], device="cpu")
        work = None
        if self._group is not None:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return numbers, work


ALONE = Channel(alone=True)


class RankGroups:
    """The channels of one process, which all ranks make at the same time.

    All at once and before the first save: making one waits for every rank, however long that is dead.
    """

    def __init__(self) -> None:
        self.training = Channel()
        """For the training threads."""
        self.writing = Channel(LONGEST_WAIT)
        """For the threads that write, or for the training threads while none does."""
