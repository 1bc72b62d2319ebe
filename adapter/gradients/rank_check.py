"""Checks that ranks are at the same point and train the same parameters; names ranks that diverged or were lost.

`RankCheck` is for ranks that average gradients, `RankAgreement` for ranks whose modules FSDP 2 shards.

The first bucket of each exchange of gradients has a header: a row of numbers for each rank. A row has the reason for
the exchange, the step, the number of exchanges since the last update, the number of updates, and a mark of the trained
parameters. The headers are summed over the ranks together with the gradients; the sum shows whether the ranks are at
the same point. On a device the header is read some exchanges later, so that the host does not wait for the device; all
ranks read the same header at the same exchange. For an error message, ranks also exchange a parameter's path and a line
of code. Lost ranks are found through the store of the process group: it works after a rank is gone, and while another
rank has not noticed it yet.
"""

from __future__ import annotations

import enum
import itertools
import sys
import time
import types
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..contract.exceptions import ContractError, RankFailedError
from ..discovery.discover import Discovered
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..plumbing.devices import LateCopy, gather_objects
from .refused import refusal
from .torch_internals import default_store, group_timeout

__all__ = [
    "AFTER_STEP",
    "BACKWARD",
    "END_OF_STEP",
    "FIRST_STEPS",
    "LATE_EXCHANGES",
    "MARKS",
    "NUMBERS",
    "UPDATE",
    "USED",
    "ExchangePoint",
    "RankAgreement",
    "RankCheck",
    "Trigger",
    "check_same_on_all_ranks",
    "lost_in_buffers",
    "users_line",
]

NUMBERS = 6
"""Numbers per rank in a header."""
LATE_EXCHANGES = 8
"""Exchanges that a device may be behind the host before the host waits for it."""
ANSWERED_WITHIN_S = 2.0
"""Seconds that a running rank may take to notice a failure and to announce that it is alive."""

_SKIP_HINT = (
    "`train_step` must update on all ranks or on none. If it skips a step for a reason that only one rank has (its "
    "own loss is nan, for example), decide by a value that is equal on all ranks: the norm of the gradients after "
    "backward, which are averaged over the ranks, or a flag that goes through torch.distributed.all_reduce. Or remove "
    "the test and set on_nonfinite to skip, which skips such an update on all ranks."
)
"""The way out if a rank ends its step without the update that other ranks make."""

END_OF_STEP, BACKWARD, UPDATE, USED = "end the step", "call backward", "update by", "leave gradients of"
"""First words of the operations that every step has."""

FIRST_STEPS = 3
"""Number of first steps in which ranks on a device wait for the other ranks' answers."""
PENDING_DIGESTS = 8
"""Digests that may be in flight; with more, a step waits for the oldest. Usually that has arrived by then."""

_NAMED_AT_MOST = 4
_MODULUS = 128
"""Numbers are sent modulo this, so that they are exact in every dtype of gradients."""

MARKS = _MODULUS * _MODULUS
"""Number of values that the mark of a bucket assignment can have."""

_NOT_THE_USERS = ("genlight.", "torch.", "contextlib", "functools", "lightning.")


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
"""Reasons that arise after `train_step` has returned, so that no line of it belongs to them."""
_ALL_OR_NONE = frozenset({Trigger.NOTHING, Trigger.LAST, Trigger.AGAIN, Trigger.SAVE})
"""Reasons that all ranks must share: either all have this one or none."""

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
    mark: int = 0
    """Mark of the bucket assignment, below `MARKS`."""
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
        return [*place, *divmod(self.mark, _MODULUS)]

    def __str__(self) -> str:
        where = f" (at {self.where})" if self.where else ""
        return _TEXTS[self.trigger].format(what=self.what or "parameters") + where


class _Header(NamedTuple):
    """A header that the device has not reached yet."""

    point: ExchangePoint
    before: ExchangePoint | None
    rows: LateCopy


_runs = itertools.count()
"""Numbers the checks of this process. All ranks create them in the same order, so that each has the same key."""


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
        self._world_size = dist.get_world_size(group)
        self._key = f"genlight/ranks/{next(_runs)}"
        self._in_flight: deque[_Header] = deque()
        self._previous: ExchangePoint | None = None

    @property
    def header_size(self) -> int:
        """Numbers in a header."""
        return NUMBERS * self._world_size

    def write(self, header: Tensor, at: ExchangePoint) -> None:
        """Write this rank's row into `header`, before it is summed over the ranks."""
        header.zero_()
        row = header[NUMBERS * self._rank :][:NUMBERS]
        if header.device.type == "cpu":  # frombuffer takes half of the time of torch.tensor with a list
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
        """Take the summed header of an exchange, as soon as the device has it queued; compare those that arrived.

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
        self.wait_for(copy, at)
        host = copy.read()
        numbers: list[float] = (host.real if host.is_complex() else host).tolist()
        return numbers

    def wait_for(self, copy: LateCopy, at: ExchangePoint) -> None:
        """Wait until the device has made `copy`; a collective that another rank never joins would block the device.

        Raises:
            RankFailedError: It has not been made within the timeout of the process group.
        """
        if copy.is_there():
            return
        began = time.monotonic()
        key = f"{self._key}/waits in step {at.step}"
        # At the full timeout the library aborts the process without naming the rank.
        most = 0.8 * group_timeout(self._group).total_seconds()
        is_announced = False
        while not copy.is_there():
            waited = time.monotonic() - began
            if waited > 1.0 and not is_announced:
                is_announced = _announce(f"{key}/{self._rank}")
            if waited > most:
                silent = _silent(key, self._rank, self._world_size)
                raise RankFailedError(
                    f"the exchange of gradients did not end within {most:.0f} s in step {at.step}, in which rank "
                    f"{dist.get_rank()} {self._with_paths(at)}; {_describe_lost(self._global_ranks(silent), most)}"
                )
            time.sleep(min(0.05, 0.0001 + waited / 10))

    def _global_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return the global numbers of these ranks of the group."""
        return list(ranks) if self._group is None else [dist.get_global_rank(self._group, rank) for rank in ranks]

    def broken(self, error: RuntimeError, at: ExchangePoint, what: Tensor) -> RankFailedError:
        """Return the error for an exchange that `error` ended; waits some seconds for answers of the other ranks.

        Args:
            error: The error of the process group.
            at: The point of this rank.
            what: The first parameter of the bucket that was being exchanged.
        """
        first = self._with_paths(at._replace(what=what)).what
        lost = _find_lost(at.step, self._group)
        return RankFailedError(
            f"the exchange of gradients broke off in step {at.step}, in which rank {dist.get_rank()} "
            f"{self._with_paths(at)}, at the bucket of {first}; {lost} ({error})"
        )

    def _diverged(self, header: _Header) -> ContractError:
        """Return the error for ranks at different points. Each of them calls this, and they gather their points."""
        before = "" if header.before is None else str(self._with_paths(header.before))
        own = tuple(self._with_paths(header.point)._replace(before=before))
        points = [ExchangePoint(*point) for point in gather_objects(own, self._group)]
        first = points[0]
        other = next((r for r, each in enumerate(points) if not _are_together([first.numbers(), each.numbers()])), 1)
        theirs = points[other]
        if first.mark != theirs.mark and _are_together([first.numbers(), theirs._replace(mark=first.mark).numbers()]):
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
    # A rank may read a gradient before it updates: the other ranks need not do the same.
    is_updated_by_some = {Trigger.UPDATE, Trigger.END_OF_STEP} <= triggers
    return triggers.isdisjoint(_ALL_OR_NONE) and not is_updated_by_some


def _describe_trained(points: Sequence[ExchangePoint], other: int) -> str:
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
        return _SKIP_HINT
    return (
        "All ranks must run `train_step` alike: with the same number of backward calls and updates, and reading "
        "gradients in the same places."
    )


class RankAgreement:
    """Compares the collective operations of ranks whose modules are sharded; called by each rank before each of them.

    A call of a unit, a backward call, an update and the read of a norm are collective. A rank that starts a different
    one would wait forever, or mix up two tensors of one shape. So ranks compare the operations that they start::

        on the CPU, and on a device in the first steps    by a message before each: the error names the operations
        on a device, after that                           by a digest of the complete step, sent without waiting for
                                                          the device and compared in a later step

    A message before each operation would wait for the device each time. The first steps find most faults: a branch that
    differs by rank is usually taken in one of them.

    Args:
        group: The ranks.
        device: Device of the messages between them.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_world_size(group)
        self.compares_each = self._is_on = False
        self._steps = 0
        self._digest = 0
        self._in_flight: deque[tuple[int, LateCopy]] = deque()

    def begin_step(self, step: int) -> None:
        """Begin a step; its number is equal on all ranks.

        Raises:
            ContractError: Ranks did different things in an earlier step.
        """
        self._steps += 1
        self._is_on = self._ranks > 1
        self.compares_each = self._device.type == "cpu" or self._steps <= FIRST_STEPS
        self._digest = step
        self._compare(PENDING_DIGESTS)

    def end_step(self, *, failed: bool) -> None:
        """End the step. After a failure the other ranks may not reach this point, so nothing is sent."""
        if self._is_on and not failed and not self.compares_each:
            self._send()
        self._is_on = False

    def close(self, *, failed: bool) -> None:
        """End the training.

        Raises:
            ContractError: Ranks did different things in one of the last steps.
        """
        if not failed:
            self.read_all()
        self._in_flight.clear()

    def read_all(self) -> None:
        """Compare all digests that were sent; waits for the device.

        Raises:
            ContractError: Ranks did different things in an earlier step.
        """
        self._compare(0)

    def __call__(self, what: str) -> None:
        """Wait until every rank is about to do `what`; later on a device, only add it to the digest of the step.

        Raises:
            ContractError: A rank is about to do something different; names both ranks and their operations.
        """
        if not self._is_on:
            return
        code = zlib.crc32(what.encode(), self._digest)
        if not self.compares_each:
            self._digest = code
            return
        codes = self._gather(code).tolist()
        if any(other != code for other in codes):
            self._is_on = False
            raise self._different(what)

    def note(self, what: str) -> None:
        """Record `what`, a local change to a shard, and compare it at the next collective operation."""
        if self._is_on:
            self._digest = zlib.crc32(what.encode(), self._digest)

    def _gather(self, code: int, *, wait: bool = True) -> Any:
        """Return the codes of all ranks, on the device; without `wait` also the pending work that fills them."""
        codes = torch.zeros(self._ranks, dtype=torch.int64, device=self._device)
        codes[dist.get_rank(self._group)].fill_(code)  # a kernel; a copy from the host would wait
        work = dist.all_reduce(codes, group=self._group, async_op=not wait)
        return codes if wait else (codes, work)

    def _send(self) -> None:
        codes, work = self._gather(self._digest, wait=False)
        work.wait()  # blocks the stream, not the host
        self._in_flight.append((self._steps, LateCopy(codes)))

    def _compare(self, pending: int) -> None:
        """Compare the digests that have arrived; wait until at most `pending` are in flight."""
        while self._in_flight and (len(self._in_flight) > pending or self._in_flight[0][1].is_there()):
            step, copy = self._in_flight.popleft()
            codes = copy.read().tolist()
            if any(code != codes[0] for code in codes):
                others = [rank for rank, code in enumerate(codes) if code != codes[0]]
                raise refusal("collective", f"in step {step} of this run, ranks {others} and rank 0")

    def _different(self, what: str) -> ContractError:
        everyone = gather_objects((what, "" if what == END_OF_STEP else users_line()), self._group)
        first = everyone[0]
        others = ((rank, other) for rank, other in enumerate(everyone) if other[0] != first[0])
        rank, other = next(others, (1, everyone[1]))
        lines = "".join(f". Rank {r} is at {line}" for r, (_, line) in ((0, first), (rank, other)) if line)
        if first[0] == other[0]:
            return refusal("collective", f"one of ranks 0 and {rank} wrote to shards before they {first[0]}")
        text = f"rank 0 is about to {first[0]}, rank {rank} to {other[0]}{lines}"
        doing = first[0] if other[0] == END_OF_STEP else other[0]
        if END_OF_STEP in (first[0], other[0]) and doing.startswith((BACKWARD, UPDATE)):
            return ContractError(f"Ranks diverged in `train_step`: {text}. {_SKIP_HINT}")
        entry = "unused parameters" if first[0].startswith(USED) and other[0].startswith(USED) else "collective"
        return refusal(entry, text)


def users_line() -> str:
    """Return the innermost line of the call stack outside of genlight, Lightning and torch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_NOT_THE_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def lost_in_buffers(error: RuntimeError, step: int, group: dist.ProcessGroup | None) -> RankFailedError:
    """Return the error for buffers that did not arrive; waits some seconds for answers of the other ranks.

    Args:
        error: The error of the process group.
        step: The step at whose end the buffers were sent.
        group: The ranks that get buffers from the first of them; None means all.
    """
    # Other ranks may have received theirs; the connection then breaks in their exchange of the next step.
    lost = _find_lost(step + 1, group)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    return RankFailedError(
        f"the buffers that rank {source} sends at the end of step {step} did not arrive; {lost} ({error})"
    )


def _find_lost(step: int, group: dist.ProcessGroup | None) -> str:
    """Describe the ranks of `group` that do not announce that an exchange of `step` broke off for them too."""
    here, key = dist.get_rank(group), f"genlight/exchange that broke off in step {step}"
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    if _announce(f"{key}/{here}"):
        silent = _silent(key, here, len(ranks))
    else:  # the rank that hosts the store is gone: under torchrun and Lightning that is the first one
        silent = [0] if here != 0 else list(range(1, len(ranks)))
    return _describe_lost([ranks[rank] for rank in silent], ANSWERED_WITHIN_S)


def _describe_lost(lost: Sequence[int], seconds: float) -> str:
    if not lost:
        return "all ranks still run, so the connection between them broke"
    names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
    return f"{names} did not answer within {seconds:.0f} s: lost, or waiting for a lost rank"


def _silent(key: str, here: int, world_size: int) -> list[int]:
    """Return the other ranks that have not announced themselves under `key`."""
    deadline = time.monotonic() + ANSWERED_WITHIN_S
    return [rank for rank in range(world_size) if rank != here and not _answers(f"{key}/{rank}", deadline)]


def _answers(key: str, deadline: float) -> bool:
    try:
        default_store().wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
    except RuntimeError:
        return False
    return True


def _announce(key: str) -> bool:
    """Announce in the store that this rank is alive; return False if the store is gone with the rank that hosts it."""
    try:
        default_store().set(key, "here")
    except RuntimeError:
        return False
    return True


def check_same_on_all_ranks(
    discovered: Discovered, group: dist.ProcessGroup | None = None, rank_local: RankLocal = EVERYTHING_SHARED
) -> None:
    """Refuse ranks whose trainers built different things.

    Raises:
        ContractError: Names the first entry that differs and the two ranks.
    """
    everyone: list[list[str]] = gather_objects(_inventory(discovered, rank_local), group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            here, there = next(
                (a, b) for a, b in zip([*everyone[0], "nothing"], [*other, "nothing"], strict=False) if a != b
            )
            raise ContractError(
                f"Ranks 0 and {rank} built different things: rank 0 has {here}, rank {rank} has {there}. `configure` "
                "must build the same modules and optimizers, in the same order, on every rank; name objects that are "
                "meant to differ in the trainer's `rank_local`."
            )


def _inventory(discovered: Discovered, rank_local: RankLocal) -> list[str]:
    tensors = rank_local.tensors(discovered)
    frozen = {id(p) for found in discovered.modules for p in found.value.parameters() if not p.requires_grad}
    lines = [f"{path} {tuple(t.shape)} {t.dtype}{' frozen' if id(t) in frozen else ''}" for path, t in tensors]
    for found in rank_local.shared(discovered):
        shapes = [[tuple(p.shape) for p in group["params"]] for group in found.value.param_groups]
        lines.append(f"{found.path} {type(found.value).__name__} over {shapes}")
    return lines
