"""Checks that ranks that average gradients are at the same point and train the same parameters; names diverged ranks.

The first bucket of each exchange of gradients has a header: a row of numbers for each rank. A row has the reason for
the exchange, the step, the number of exchanges since the last update, the number of updates, and a checksum of the
trained parameters. The headers are summed over the ranks together with the gradients; the sum shows whether the ranks
are at the same point. On a device the header is read some exchanges later, so that the host does not wait for the
device; all ranks read the same header at the same exchange. If the points differ, ranks also exchange a parameter's
path and a line of code, for the error message.
"""

from __future__ import annotations

import enum
import itertools
import sys
import time
import types
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..contract.exceptions import ContractError, RankFailedError
from ..plumbing.devices import LateCopy, gather_objects
from .lost_ranks import announce, describe_lost, find_lost, find_silent
from .refused import SKIP_HINT
from .torch_internals import group_timeout

NUMBERS = 6
"""Numbers per rank in a header."""
LATE_EXCHANGES = 8
"""Exchanges that a device may be behind the host before the host waits for it."""
FIRST_STEPS = 3
"""Number of first steps in which a rank on a device waits for the flags or messages of the other ranks.

The first steps find most faults; in later ones, such a wait would cost time in each step.
"""
_NAMED_AT_MOST = 4
_NOT_THE_USERS = ("genlight.", "torch.", "contextlib", "functools", "lightning.")
_MODULUS = 128
"""Numbers are sent modulo this, so that they are exact in every dtype of gradients."""

CHECKSUMS = _MODULUS * _MODULUS
"""Number of values that the checksum of the trained parameters can have."""


class Trigger(enum.IntEnum):
    """The reason for an exchange of gradients."""

    UPDATE = 1
    READ = 2
    BACKWARD = 3
    END_OF_STEP = 4
    NOTHING = 5
    LAST = 6
    AGAIN = 7
    SAVE = 8


AFTER_STEP = frozenset({Trigger.END_OF_STEP, Trigger.NOTHING, Trigger.LAST, Trigger.SAVE})
"""Reasons that arise after `train_step` has returned, so that no line of `train_step` can be named."""
_ALL_OR_NONE = frozenset({Trigger.NOTHING, Trigger.LAST, Trigger.AGAIN, Trigger.SAVE})
"""Reasons that all ranks must have if one rank has them."""

_TEXTS = {
    Trigger.UPDATE: "updates {what}",
    Trigger.READ: "reads the gradient of {what}",
    Trigger.BACKWARD: "calls backward",
    Trigger.END_OF_STEP: "has ended the step with gradients but without an update",
    Trigger.NOTHING: "has ended the step without a backward call",
    Trigger.LAST: "has ended the last step",
    Trigger.SAVE: "saves a checkpoint",
    Trigger.AGAIN: "sends gradients again, because backward changed some after they were sent",
}


class ExchangePoint(NamedTuple):
    """A point of a rank's training at which it averages gradients."""

    trigger: Trigger = Trigger.UPDATE
    step: int = 0
    ordinal: int = 0
    """Exchanges since the last update."""
    updates: int = 0
    """Updates that this rank has made."""
    checksum: int = 0
    """Checksum of the trained parameters, below `CHECKSUMS`; equal if ranks assign them to buckets alike."""
    what: Tensor | str = ""
    """The parameter whose gradient is read, or the first parameter that is updated."""
    where: str = ""
    """A line of the trainer's code, or empty."""
    last_update: str = ""
    """The line of the rank's last update."""
    before: str = ""
    """Description of the previous point."""
    trained: tuple[str, ...] = ()
    """Paths of the trained parameters; only set for a message."""

    def numbers(self) -> list[int]:
        """Return the values to compare with other ranks."""
        place = [int(self.trigger), self.step % _MODULUS, min(self.ordinal, _MODULUS - 1), self.updates % _MODULUS]
        return [*place, *divmod(self.checksum, _MODULUS)]

    def __str__(self) -> str:
        where = f" (at {self.where})" if self.where else ""
        return _TEXTS[self.trigger].format(what=self.what or "parameters") + where


class _Header(NamedTuple):
    """The summed header of an exchange that the device may not have reached yet."""

    point: ExchangePoint
    before: ExchangePoint | None
    rows: LateCopy


_runs = itertools.count()
"""Counts the `RankCheck` objects of this process, for their keys in the store; all ranks create them in one order."""


class RankCheck:
    """Compares the points of the ranks, and names ranks that diverged or were lost.

    Args:
        group: Process group of the ranks; None means all.
        with_paths: Returns a point with paths in place of parameters, for a message.
    """

    def __init__(self, group: dist.ProcessGroup | None, with_paths: Callable[[ExchangePoint], ExchangePoint]) -> None:
        self._group = group
        self._with_paths = with_paths
        self._rank = dist.get_rank(group)
        self._key = f"genlight/ranks/{next(_runs)}"
        self._in_flight: deque[_Header] = deque()
        self._previous: ExchangePoint | None = None

    def write(self, header: Tensor, at: ExchangePoint) -> None:
        """Write this rank's row into `header`, before it is summed over the ranks."""
        header.zero_()
        row = header[NUMBERS * self._rank :][:NUMBERS]
        if header.device.type == "cpu":  # frombuffer takes half as long as torch.tensor with a list
            row.copy_(torch.frombuffer(array("f", at.numbers()), dtype=torch.float32))
        else:  # pinned, so that the host does not wait and the memory stays valid until it is read
            row.copy_(torch.tensor(at.numbers(), dtype=header.dtype, pin_memory=True), non_blocking=True)

    def receive(
        self,
        header: Tensor,
        at: ExchangePoint,
        *,
        most_left: int = LATE_EXCHANGES,
        before_error: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the summed header of an exchange; compare it at once on the host, and some exchanges later on a device.

        Args:
            header: The tensor of `write`, summed over the ranks.
            at: The point of this rank.
            most_left: Headers that may stay unread while they are on a device.
            before_error: Called if ranks have diverged, before they gather their points.

        Raises:
            ContractError: The ranks were at different points.
            RankFailedError: The device did not reach this exchange.
        """
        self._in_flight.append(_Header(at, self._previous, LateCopy(header)))
        self._previous = at
        self.read_all(most_left if self._in_flight[-1].rows.is_late else 0, before_error=before_error)

    def read_all(self, most_left: int = 0, *, before_error: Callable[[], None] = lambda: None) -> None:
        """Compare all headers that were sent, except for the `most_left` newest ones; see `receive`.

        Raises:
            ContractError: The ranks were at different points.
            RankFailedError: The device did not reach an exchange.
        """
        while len(self._in_flight) > most_left:
            header = self._in_flight.popleft()
            numbers = self._numbers(header.rows, header.point)
            if not _are_together([numbers[i : i + NUMBERS] for i in range(0, len(numbers), NUMBERS)]):
                before_error()
                raise self._diverged(header)

    def read(self, values: Tensor, at: ExchangePoint) -> list[float]:
        """Wait for `values` on the host or a device, and return them.

        Raises:
            RankFailedError: They do not arrive.
        """
        return self._numbers(LateCopy(values), at)

    def _numbers(self, copy: LateCopy, at: ExchangePoint) -> list[float]:
        self._wait_for(copy, at)
        host = copy.read()
        numbers: list[float] = (host.real if host.is_complex() else host).tolist()
        return numbers

    def _wait_for(self, copy: LateCopy, at: ExchangePoint) -> None:
        """Wait until the device has made `copy`.

        Raises:
            RankFailedError: A collective that another rank never joins blocks the device.
        """
        if copy.is_there():
            return
        began = time.monotonic()
        key = f"{self._key}/waits in step {at.step}"
        # Give up before the timeout: then the device's library (NCCL) aborts the process without naming the lost rank.
        most = 0.8 * group_timeout(self._group).total_seconds()
        is_announced = False
        while not copy.is_there():
            waited = time.monotonic() - began
            if waited > 1.0 and not is_announced:
                is_announced = announce(f"{key}/{self._rank}")
            if waited > most:
                silent = find_silent(key, self._group)
                raise RankFailedError(
                    f"the exchange of gradients did not end within {most:.0f} s in step {at.step}, in which rank "
                    f"{dist.get_rank()} {self._with_paths(at)}; {describe_lost(silent, most)}"
                )
            time.sleep(min(0.05, 0.0001 + waited / 10))

    def explain_broken_exchange(self, error: RuntimeError, at: ExchangePoint, what: Tensor) -> RankFailedError:
        """Return the error for an exchange that broke off; waits some seconds for answers of the other ranks.

        Args:
            error: The error of the process group that ended the exchange.
            at: The point of this rank.
            what: The first parameter of the bucket that was being exchanged.
        """
        first = self._with_paths(at._replace(what=what)).what
        lost = find_lost(at.step, self._group)
        return RankFailedError(
            f"the exchange of gradients broke off in step {at.step}, in which rank {dist.get_rank()} "
            f"{self._with_paths(at)}, at the bucket of {first}; {lost} ({error})"
        )

    def _diverged(self, header: _Header) -> ContractError:
        """Return the error for ranks at different points. Collective: every rank sends its point."""
        before = "" if header.before is None else str(self._with_paths(header.before))
        own = tuple(self._with_paths(header.point)._replace(before=before))
        points = [ExchangePoint(*point) for point in gather_objects(own, self._group)]
        first = points[0]
        other = next((r for r, each in enumerate(points) if not _are_together([first.numbers(), each.numbers()])), 1)
        theirs = points[other]
        if first.checksum != theirs.checksum and _are_together(
            [first.numbers(), theirs._replace(checksum=first.checksum).numbers()]
        ):
            return ContractError(_describe_trained(points, other))
        here, there = f"rank 0 {_in_step(first)}", f"rank {other} {_in_step(theirs)}"
        counted = ""
        if first.ordinal == theirs.ordinal and first.updates != theirs.updates:
            ahead = 0 if first.updates > theirs.updates else other
            where = points[ahead].last_update
            counted = (
                f" Rank 0 has made {first.updates} updates, rank {other} {theirs.updates}; "
                f"the last one of rank {ahead} is at {where or 'an unknown line'}."
            )
        return ContractError(f"Ranks diverged: {here}, while {there}.{counted} {_hint(first, theirs)}")


def _are_together(rows: Sequence[Sequence[float]]) -> bool:
    """Whether the points of the ranks that sent these rows are compatible."""
    if any(row[1:] != rows[0][1:] for row in rows):
        return False
    triggers = {int(row[0]) for row in rows}
    if len(triggers) == 1:
        return True
    # One rank may read a gradient before its update while another updates without a read. But if one updates and
    # another has ended its step, they have diverged.
    is_updated_by_some = {Trigger.UPDATE, Trigger.END_OF_STEP} <= triggers
    return triggers.isdisjoint(_ALL_OR_NONE) and not is_updated_by_some


def _describe_trained(points: Sequence[ExchangePoint], other: int) -> str:
    """Return the message for ranks that train different parameters."""
    differences = []
    for rank, without in ((0, other), (other, 0)):
        extra = sorted({*points[rank].trained} - {*points[without].trained})
        if extra:
            differences.append(f"rank {rank} trains {', '.join(extra[:_NAMED_AT_MOST])}, rank {without} does not")
    why = "; ".join(differences) or f"ranks 0 and {other} have parameters of different shapes"
    return (
        f"Ranks train different parameters in step {points[0].step}: {why}. Decide by values that are equal on all "
        "ranks, such as the step or an averaged loss, which parameters to freeze, unfreeze or replace; a parameter "
        "that no optimizer holds must get its first gradient on all ranks at once."
    )


def _in_step(point: ExchangePoint) -> str:
    before = f", right after it {point.before}" if point.ordinal else ""
    return f"{point} in step {point.step}{before}"


def _hint(one: ExchangePoint, other: ExchangePoint) -> str:
    """Return the way out for ranks at the points `one` and `other`."""
    if Trigger.AGAIN in {one.trigger, other.trigger}:
        return (
            "A checkpointed segment that only some ranks use twice can cause that, or a hook: pass use_reentrant=False "
            "to torch.utils.checkpoint, or raise `bucket_cap_mb` of the strategy until one bucket has all gradients."
        )
    if one.ordinal != other.ordinal:
        return (
            "All ranks must call backward equally often before an update, and read gradients between these calls on "
            "all ranks or on none. A rank that has nothing to add may use a zero loss: `(0 * loss).backward()`."
        )
    if one.updates != other.updates or {one.trigger, other.trigger} & {Trigger.NOTHING, Trigger.END_OF_STEP}:
        return SKIP_HINT
    return (
        "All ranks must run `train_step` alike: with the same number of backward calls and updates, and reading "
        "gradients in the same places."
    )


def find_user_line() -> str:
    """Return the innermost line of the call stack outside of genlight, Lightning and torch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_NOT_THE_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
