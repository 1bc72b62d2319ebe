"""What ranks tell each other about an exchange of gradients: where each is, whether it sends, and what it has."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .rank_points import NUMBERS, Point

__all__ = ["ROW", "Notes", "points_of"]

ROW = NUMBERS + 2
"""How many numbers a rank has for itself: its point, whether it sends, and whether buckets have to be sent again."""
_SENDS, _REPEATS = NUMBERS, NUMBERS + 1


class Notes:
    """Numbers that are summed over the ranks: a row for each, then one for each tensor that no optimizer holds.

    A single bucket takes them along. Where there are several, they travel beside them, from host to host: a rank then
    learns before it sends anything whether another one wants to, and no host waits for its device to know.

    Args:
        others: How many tensors no optimizer holds.
        rank: Of this process, in the group.
        values: The place in a bucket; None makes one.
        group: Of host memory, in which they travel; None where a bucket takes them along.
    """

    def __init__(
        self, others: int, rank: int, *, values: Tensor | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        if values is None:
            values = torch.zeros(self.count(others, group), dtype=torch.float32, device="cpu")
        self._values = values
        self._count_others = others
        rows = values.numel() - others
        self.rows, self._others = values[:rows], values[rows:]
        self._mine = self.rows[ROW * rank :][:ROW]
        self._work: Any = None

    @staticmethod
    def count(others: int, group: dist.ProcessGroup | None) -> int:
        """How many numbers there are."""
        return ROW * dist.get_world_size(group) + others

    @property
    def are_apart(self) -> bool:
        """Whether they travel in a message of their own."""
        return self.group is not None

    def write(self, at: Point, used: Sequence[bool] = (), *, sends: bool = True, repeats: bool = False) -> None:
        """Write what this rank has to say.

        Args:
            at: Where it is.
            used: Whether it has a gradient for each of the tensors that no optimizer holds; empty for none of them.
            sends: Whether it sends its buckets, whatever the others do.
            repeats: Whether buckets that were sent inside of backward have to be sent again.
        """
        self._values.zero_()
        # A buffer is read in half of the time that torch.tensor takes for a list.
        self._mine.copy_(torch.frombuffer(array("f", (*at.numbers(), sends, repeats)), dtype=torch.float32))
        if used:
            self._others.copy_(torch.tensor(used, device="cpu"))

    def send(self) -> None:
        """Start to tell the others, in a message of their own."""
        self._work = dist.all_reduce(self._values, group=self.group, async_op=True)

    def wait(self) -> None:
        """Until all ranks have told theirs."""
        work, self._work = self._work, None
        work.wait()

    def anyone_sends(self) -> bool:
        """Whether any rank sends its buckets, once the notes have arrived."""
        return self._any(_SENDS)

    def anyone_repeats(self) -> bool:
        """Whether any rank asks for buckets to be sent again, once the notes have arrived."""
        return self._any(_REPEATS)

    def used_by_anyone(self) -> list[bool]:
        """For each of the tensors that no optimizer holds, whether any rank has a gradient."""
        return [number > 0 for number in self._others.real.tolist()] if self._count_others else []

    def _any(self, column: int) -> bool:
        # What travels in a bucket has the type of the gradients, which may be complex.
        return any(number > 0 for number in self.rows[column::ROW].real.tolist())


def points_of(rows: Tensor) -> list[list[float]]:
    """The numbers of the ranks' points, which `Point.numbers` gave, from their rows."""
    numbers: list[float] = (rows.real if rows.is_complex() else rows).tolist()
    return [numbers[i : i + NUMBERS] for i in range(0, len(numbers), ROW)]
