"""Compares where the ranks were when they averaged, without having the host wait for a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_notes import points_of
from .rank_points import Point, are_together, parted

__all__ = ["LATE_CALLS", "SentPoints"]

LATE_CALLS = 8
"""How many calls a GPU may be behind the host before the host waits for it."""


class _SentPoint(NamedTuple):
    """Where this rank was, the numbers of all ranks on their way through the device, and when they can be read."""

    point: Point
    before: Point | None
    numbers: Tensor
    ready: torch.cuda.Event | None


class SentPoints:
    """The points that were exchanged and not compared yet.

    Args:
        group: Of the ranks that exchange them; None means all.
        named: Gives a point whose parameter has its path, for a message.
    """

    def __init__(self, group: dist.ProcessGroup | None, named: Callable[[Point], Point]) -> None:
        self._group = group
        self._named = named
        self._sent: deque[_SentPoint] = deque()
        self._previous: Point | None = None

    def add(self, at: Point, numbers: Tensor) -> None:
        """All ranks have sent theirs.

        Args:
            at: Where this rank is.
            numbers: The rows of `Notes`.
        """
        self._sent.append(_SentPoint(at, self._previous, *_to_host(numbers)))
        self._previous = at

    def check(self, most_left: int) -> None:
        """Compare all but the last `most_left`; those that are on the host already, in any case.

        All ranks look at a point after the same number of others, so that all raise the error in the same call.

        Raises:
            ContractError: The ranks were not together.
        """
        while self._sent and (len(self._sent) > most_left or self._sent[-1].ready is None):
            sent = self._sent.popleft()
            if sent.ready is not None and not sent.ready.query():  # type: ignore[no-untyped-call]
                sent.ready.synchronize()
            if not are_together(points_of(sent.numbers)):
                before = "" if sent.before is None else str(self._named(sent.before))
                raise parted(self._named(sent.point)._replace(before=before), self._group)


def _to_host(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what to wait for before it is read."""
    if value.device.type != "cuda":
        return value, None
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return host, ready
