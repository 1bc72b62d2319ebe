"""Where in the trainer's code each rank is when ranks average gradients, so that ranks that part ways are named."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..contract.exceptions import ContractError

__all__ = ["MARKS", "NUMBERS", "SKIPPED_ALONE", "Point", "Why", "are_together", "parted", "users_line"]

NUMBERS = 6
"""How many numbers of a point travel with the gradients."""

SKIPPED_ALONE = (
    "`train_step` must update on all ranks or on none. Where it skips a step for a reason that only one rank has (its "
    "own loss is nan, say), decide by something that all ranks see alike: the norm of the gradients after backward, "
    "which are those of all ranks, or a flag that goes through torch.distributed.all_reduce; or leave the test out and "
    "set on_nonfinite to skip, which leaves out such an update on all ranks."
)
"""What to do about a rank that ends its step without the update that others make."""

_NAMED_AT_MOST = 4
_MODULUS = 128
"""Numbers are sent modulo this, which is exact in every dtype that gradients have."""

MARKS = _MODULUS * _MODULUS
"""How many values the mark of a plan has; the last one says that parameters were replaced."""

_NOT_THE_USERS = ("genlight.", "torch.", "contextlib", "functools", "lightning.")


class Why(enum.IntEnum):
    """What had the gradients averaged."""

    UPDATE = 1
    READ = 2
    BACKWARD = 3
    AUTOGRAD_GRAD = 4
    COLLECTIVE = 5
    END_OF_STEP = 6
    NOTHING = 7
    INSIDE = 8
    LAST = 9


_TEXTS = {
    Why.UPDATE: "updates {what}",
    Why.READ: "reads the gradient of {what}",
    Why.BACKWARD: "calls backward",
    Why.AUTOGRAD_GRAD: "calls torch.autograd.grad",
    Why.COLLECTIVE: "calls torch.distributed.{what}",
    Why.END_OF_STEP: "has ended the step with gradients and without an update",
    Why.INSIDE: "updates {what} inside of backward",
    Why.NOTHING: "has ended the step without a backward call",
    Why.LAST: "has ended the last step",
}


class Point(NamedTuple):
    """A point of a rank's training at which it averages gradients."""

    why: Why = Why.UPDATE
    step: int = 0
    ordinal: int = 0
    """How many times gradients were averaged for the same update already."""
    updates: int = 0
    """How many updates this rank has made."""
    what: Tensor | str = ""
    """The parameter whose gradient is read, the first one of those that are updated, or the name of a collective."""
    where: str = ""
    """A line of the trainer's code, or empty."""
    last_update: str = ""
    """Where the rank made its last update."""
    before: str = ""
    """The point before this one."""
    mark: int = 0
    """Of the plan by which gradients are averaged, below `MARKS`."""
    trained: tuple[str, ...] = ()
    """Paths of the parameters that want a gradient; only for a message."""

    def numbers(self) -> list[int]:
        """What is compared with other ranks."""
        place = [int(self.why), self.step % _MODULUS, min(self.ordinal, _MODULUS - 1), self.updates % _MODULUS]
        return [*place, *divmod(self.mark, _MODULUS)]

    def __str__(self) -> str:
        where = f" (at {self.where})" if self.where else ""
        return _TEXTS[self.why].format(what=self.what or "parameters") + where


def are_together(numbers: Sequence[Sequence[float]]) -> bool:
    """Whether the ranks that sent these `numbers`, a row each, are at points that belong together."""
    if any(row[1:] != numbers[0][1:] for row in numbers):
        return False
    why = {int(row[0]) for row in numbers}
    # A rank that reads a gradient before it updates does nothing that the others need to know of.
    return len(why) == 1 or (why.isdisjoint({Why.NOTHING, Why.LAST}) and not why >= {Why.UPDATE, Why.END_OF_STEP})


def parted(mine: Point, group: dist.ProcessGroup | None) -> ContractError:
    """The error of ranks that are not together; to be called by all of them, each with its own point."""
    points: list[Point] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(points, mine, group=group)
    first = points[0]
    other = next((r for r, p in enumerate(points) if not are_together([first.numbers(), p.numbers()])), 1)
    theirs = points[other]
    if first.mark != theirs.mark and are_together([first.numbers(), theirs._replace(mark=first.mark).numbers()]):
        return ContractError(_trained_differently(points, other))
    here, there = f"rank 0 {_in_step(first)}", f"rank {other} {_in_step(points[other])}"
    counted = ""
    if first.ordinal == points[other].ordinal and first.updates != points[other].updates:
        ahead = 0 if first.updates > points[other].updates else other
        where = points[ahead].last_update
        counted = (
            f" Rank 0 has made {first.updates} updates, rank {other} {points[other].updates}; "
            f"the last one of rank {ahead} is at {where or 'an unknown line'}."
        )
    return ContractError(f"Ranks part ways: {here}, while {there}.{counted} {_cure(first, points[other])}")


def _trained_differently(points: Sequence[Point], other: int) -> str:
    named = []
    for rank, without in ((0, other), (other, 0)):
        alone = sorted({*points[rank].trained} - {*points[without].trained})
        if alone:
            named.append(f"rank {rank} trains {', '.join(alone[:_NAMED_AT_MOST])}, rank {without} does not")
    why = "; ".join(named) or f"one of the ranks 0 and {other} has replaced parameters, the other has not"
    return (
        f"Ranks train different parameters in step {points[0].step}: {why}. What is frozen, unfrozen or replaced must "
        "be decided by what is equal on all ranks, such as the step or an averaged loss."
    )


def _in_step(point: Point) -> str:
    before = f", after it {point.before}" if point.ordinal else ""
    return f"{point} in step {point.step}{before}"


def _cure(one: Point, other: Point) -> str:
    if one.ordinal != other.ordinal:
        return (
            "`train_step` reads gradients between its backward calls on some ranks only; it must do so on all, where "
            "ranks have as many backward calls as they like."
        )
    if Why.NOTHING in (one.why, other.why) or one.updates != other.updates or Why.END_OF_STEP in (one.why, other.why):
        return SKIPPED_ALONE
    return (
        "All ranks must go through `train_step` alike, their backward calls aside: as many updates, and gradients that "
        "are read in the same places."
    )


def users_line() -> str:
    """The line of the trainer's code that led here: the innermost that belongs neither to genlight nor to torch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_NOT_THE_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
