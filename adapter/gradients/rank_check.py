"""Who is where, who is lost and who has other parameters, among ranks that train together.

`RankCheck` is for ranks that average gradients, `RankAgreement` for those whose modules FSDP 2 shards.

The first bucket of each exchange of gradients has a header: a row of numbers for each rank, that say why it averages,
in which step, how often since its last update, how many updates it has made and which parameters it trains. Summed over
the ranks with the gradients, they show whether the ranks belong together. On a device they are read some exchanges
later, so that no host waits for it; all ranks read the same header at the same exchange. What a message needs beside
the numbers (a parameter's path, a line of code), and who is lost, ranks tell each other through the store where they
met: that works also where a rank is gone, and where another one has not noticed anything yet.
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
    "AT_ITS_END",
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
"""How many numbers a rank has in a header."""
LATE_EXCHANGES = 8
"""How many exchanges a device may be behind the host before the host waits for it."""
ANSWERED_WITHIN_S = 2.0
"""How long a rank that still runs may take to notice that something is wrong and say so."""

_SKIPPED_ALONE = (
    "`train_step` must update on all ranks or on none. Where it skips a step for a reason that only one rank has (its "
    "own loss is nan, say), decide by something that all ranks see alike: the norm of the gradients after backward, "
    "which are those of all ranks, or a flag that goes through torch.distributed.all_reduce; or leave the test out and "
    "set on_nonfinite to skip, which leaves out such an update on all ranks."
)
"""The way out for a rank that ends its step without the update that others make."""

END_OF_STEP, BACKWARD, UPDATE, USED = "end the step", "call backward", "update by", "leave gradients of"
"""How the messages begin that are about a whole step."""

FIRST_STEPS = 3
"""Steps in which ranks on a device wait to learn what the others do."""
PENDING_DIGESTS = 8
"""Digests that may be on their way; a step waits for the oldest of more, which is there by then."""

_NAMED_AT_MOST = 4
_MODULUS = 128
"""Numbers are sent modulo this, which is exact in every dtype that gradients have."""

MARKS = _MODULUS * _MODULUS
"""How many values the mark of a bucket assignment has."""

_NOT_THE_USERS = ("genlight.", "torch.", "contextlib", "functools", "lightning.")


class Trigger(enum.IntEnum):
    """The call that had the gradients averaged."""

    UPDATE = 1
    READ = 2
    BACKWARD = 3
    END_OF_STEP = 4
    NOTHING = 5
    LAST = 6
    AGAIN = 7
    SAVE = 8


AT_ITS_END = frozenset({Trigger.END_OF_STEP, Trigger.NOTHING, Trigger.LAST, Trigger.SAVE})
"""What happens once `train_step` has returned, and at no line of it."""
_ALONE = frozenset({Trigger.NOTHING, Trigger.LAST, Trigger.AGAIN, Trigger.SAVE})
"""What all ranks do or none."""


_TEXTS = {
    Trigger.UPDATE: "updates {what}",
    Trigger.READ: "reads the gradient of {what}",
    Trigger.BACKWARD: "calls backward",
    Trigger.END_OF_STEP: "has ended the step with gradients and without an update",
    Trigger.NOTHING: "has ended the step without a backward call",
    Trigger.LAST: "has ended the last step",
    Trigger.SAVE: "saves a checkpoint",
    Trigger.AGAIN: "sends gradients again, because backward changed some after they had left",
}


class ExchangePoint(NamedTuple):
    """A point of a rank's training at which it averages gradients."""

    trigger: Trigger = Trigger.UPDATE
    step: int = 0
    ordinal: int = 0
    """How many times gradients were averaged since the last update."""
    updates: int = 0
    """How many updates this rank has made."""
    mark: int = 0
    """Of the bucket assignment, below `MARKS`."""
    what: Tensor | str = ""
    """The parameter whose gradient is read, or the first one of those that are updated."""
    where: str = ""
    """A line of the trainer's code, or empty."""
    last_update: str = ""
    """Where the rank made its last update."""
    before: str = ""
    """The point before this one."""
    trained: tuple[str, ...] = ()
    """Paths of the parameters that want a gradient; only for a message."""

    def numbers(self) -> list[int]:
        """The values that are compared with other ranks."""
        place = [int(self.trigger), self.step % _MODULUS, min(self.ordinal, _MODULUS - 1), self.updates % _MODULUS]
        return [*place, *divmod(self.mark, _MODULUS)]

    def __str__(self) -> str:
        where = f" (at {self.where})" if self.where else ""
        return _TEXTS[self.trigger].format(what=self.what or "parameters") + where


class _Header(NamedTuple):
    """A header on its way through the device."""

    point: ExchangePoint
    before: ExchangePoint | None
    rows: LateCopy


_runs = itertools.count()
"""Of the checks of this process: all ranks make theirs in the same order, so that keys in the store are their own."""


class RankCheck:
    """Compares where the ranks are, and names those that are elsewhere or lost.

    Args:
        group: Of the ranks; None means all.
        named: Gives a point whose parameter has its path, for a message.
    """

    def __init__(self, group: dist.ProcessGroup | None, named: Callable[[ExchangePoint], ExchangePoint]) -> None:
        self._group = group
        self._named = named
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._key = f"genlight/ranks/{next(_runs)}"
        self._on_their_way: deque[_Header] = deque()
        self._previous: ExchangePoint | None = None

    @property
    def header_size(self) -> int:
        """How many numbers a header has."""
        return NUMBERS * self._world_size

    def write(self, header: Tensor, at: ExchangePoint) -> None:
        """Write this rank's row into `header`, which is summed over the ranks then."""
        header.zero_()
        row = header[NUMBERS * self._rank :][:NUMBERS]
        if header.device.type == "cpu":  # a buffer is read in half of the time that torch.tensor takes for a list
            row.copy_(torch.frombuffer(array("f", at.numbers()), dtype=torch.float32))
        else:  # pinned, so that the host does not wait and the memory lives until it was read
            row.copy_(torch.tensor(at.numbers(), dtype=header.dtype, pin_memory=True), non_blocking=True)

    def arrived(self, header: Tensor, at: ExchangePoint, *, most_left: int = LATE_EXCHANGES) -> None:
        """The sum of all headers is there, as far as the device is; compare those that can be read.

        Args:
            header: As it was written and summed.
            at: Where this rank was.
            most_left: Headers that may stay unread, of those that are still on a device.

        Raises:
            ContractError: The ranks were not together.
            RankFailedError: The device never came this far.
        """
        self._on_their_way.append(_Header(at, self._previous, LateCopy(header)))
        self._previous = at
        self.read_all(most_left if self._on_their_way[-1].rows.is_late else 0)

    def read_all(self, most_left: int = 0) -> None:
        """Compare all headers that were sent, but for the `most_left` newest ones.

        Raises:
            ContractError: The ranks were not together.
            RankFailedError: The device never came this far.
        """
        while len(self._on_their_way) > most_left:
            self._compare(self._on_their_way.popleft())

    def _compare(self, header: _Header) -> None:
        numbers = self._numbers(header.rows, header.point)
        if not _are_together([numbers[i : i + NUMBERS] for i in range(0, len(numbers), NUMBERS)]):
            raise self._apart(header)

    def read(self, values: Tensor, at: ExchangePoint) -> list[float]:
        """`values` of a device, once they are there; the host waits for them.

        Raises:
            RankFailedError: They do not come.
        """
        return self._numbers(LateCopy(values), at)

    def _numbers(self, copy: LateCopy, at: ExchangePoint) -> list[float]:
        self.wait_for(copy, at)
        host = copy.read()
        numbers: list[float] = (host.real if host.is_complex() else host).tolist()
        return numbers

    def wait_for(self, copy: LateCopy, at: ExchangePoint) -> None:
        """Until the device has come to `copy`; a collective that another rank never joins keeps it from that.

        Raises:
            RankFailedError: It has not within the timeout of the process group.
        """
        if copy.is_there():
            return
        began = time.monotonic()
        key = f"{self._key}/waits in step {at.step}"
        # The library aborts the process at its timeout, without the rank's name.
        most = 0.8 * group_timeout(self._group).total_seconds()
        is_announced = False
        while not copy.is_there():
            waited = time.monotonic() - began
            if waited > 1.0 and not is_announced:
                is_announced = _tell(f"{key}/{self._rank}", "here")
            if waited > most:
                silent = _silent(key, self._rank, self._world_size)
                raise RankFailedError(
                    f"the exchange of gradients did not end within {most:.0f} s in step {at.step}, where rank "
                    f"{dist.get_rank()} {self._named(at)}; {_about(self._ranks(silent), most)}"
                )
            time.sleep(min(0.05, 0.0001 + waited / 10))

    def _ranks(self, ranks: Sequence[int]) -> list[int]:
        """Ranks of the group as they are numbered among all."""
        return list(ranks) if self._group is None else [dist.get_global_rank(self._group, rank) for rank in ranks]

    def broken(self, error: RuntimeError, at: ExchangePoint, what: Tensor) -> RankFailedError:
        """The error of an exchange that `error` ended; waits some seconds for the other ranks, which see it break, too.

        Args:
            error: What the process group raised.
            at: Where this rank is.
            what: The first parameter of the bucket that was on its way.
        """
        first = self._named(at._replace(what=what)).what
        lost = _who_is_lost(at.step, self._group)
        return RankFailedError(
            f"the exchange of gradients broke off in step {at.step}, where rank {dist.get_rank()} {self._named(at)}, "
            f"at the bucket of {first}; {lost} ({error})"
        )

    def _apart(self, header: _Header) -> ContractError:
        """The error of ranks that are not together, each of which comes here by itself."""
        before = "" if header.before is None else str(self._named(header.before))
        own = tuple(self._named(header.point)._replace(before=before))
        points = [ExchangePoint(*point) for point in gather_objects(own, self._group)]
        first = points[0]
        other = next((r for r, each in enumerate(points) if not _are_together([first.numbers(), each.numbers()])), 1)
        theirs = points[other]
        if first.mark != theirs.mark and _are_together([first.numbers(), theirs._replace(mark=first.mark).numbers()]):
            return ContractError(_trained_differently(points, other))
        here, there = f"rank 0 {_in_step(first)}", f"rank {other} {_in_step(theirs)}"
        counted = ""
        if first.ordinal == theirs.ordinal and first.updates != theirs.updates:
            ahead = 0 if first.updates > theirs.updates else other
            where = points[ahead].last_update
            counted = (
                f" Rank 0 has made {first.updates} updates, rank {other} {theirs.updates}; "
                f"the last one of rank {ahead} is at {where or 'an unknown line'}."
            )
        return ContractError(f"Ranks part ways: {here}, while {there}.{counted} {_cure(first, theirs)}")


def _are_together(rows: Sequence[Sequence[float]]) -> bool:
    """Whether the ranks that sent these rows are at points that belong together."""
    if any(row[1:] != rows[0][1:] for row in rows):
        return False
    triggers = {int(row[0]) for row in rows}
    if len(triggers) == 1:
        return True
    # A rank that reads a gradient before it updates does nothing that the others need to know of.
    is_updated_by_some = {Trigger.UPDATE, Trigger.END_OF_STEP} <= triggers
    return triggers.isdisjoint(_ALONE) and not is_updated_by_some


def _trained_differently(points: Sequence[ExchangePoint], other: int) -> str:
    named = []
    for rank, without in ((0, other), (other, 0)):
        alone = sorted({*points[rank].trained} - {*points[without].trained})
        if alone:
            named.append(f"rank {rank} trains {', '.join(alone[:_NAMED_AT_MOST])}, rank {without} does not")
    why = "; ".join(named) or f"ranks 0 and {other} have parameters of other shapes"
    return (
        f"Ranks train different parameters in step {points[0].step}: {why}. What is frozen, unfrozen or replaced must "
        "be decided by what is equal on all ranks, such as the step or an averaged loss; what no optimizer holds must "
        "get its first gradient on all ranks at once."
    )


def _in_step(point: ExchangePoint) -> str:
    before = f", after it {point.before}" if point.ordinal else ""
    return f"{point} in step {point.step}{before}"


def _cure(one: ExchangePoint, other: ExchangePoint) -> str:
    if Trigger.AGAIN in {one.trigger, other.trigger}:
        return (
            "A checkpointed segment that only some ranks use twice, or a hook, does that: pass use_reentrant=False to "
            "torch.utils.checkpoint, or raise `bucket_cap_mb` of the strategy until all gradients travel in one bucket."
        )
    if one.ordinal != other.ordinal:
        return (
            "All ranks must call backward as often before an update, and read gradients between its calls on all ranks "
            "or on none. A rank that has nothing to add may call it with a loss of zero: `(0 * loss).backward()`."
        )
    if one.updates != other.updates or {one.trigger, other.trigger} & {Trigger.NOTHING, Trigger.END_OF_STEP}:
        return _SKIPPED_ALONE
    return (
        "All ranks must go through `train_step` alike: as many backward calls and updates, and gradients that are read "
        "in the same places."
    )


class RankAgreement:
    """Called by every rank with what takes all of them, where modules are sharded.

    A call of a unit, a backward, an update and a look at a norm each talk to the other ranks. A rank that comes with
    another one would wait for ever, or mix up two tensors of one shape. So ranks compare what they are about to do::

        on the CPU, and on a device in the first steps    before it, by a message: the error names who does what
        on a device, after that                           a digest of the whole step, sent without waiting for the
                                                          device, and looked at in a later step

    A message before each would wait for the device each time; a branch that differs by rank is mostly taken at once.

    Args:
        group: The ranks.
        device: Where messages between them are.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_world_size(group)
        self.tells_all = self._is_on = False
        self._steps = 0
        self._digest = 0
        self._on_their_way: deque[tuple[int, LateCopy]] = deque()

    def begin_step(self, step: int) -> None:
        """A step begins, its number is equal on all ranks.

        Raises:
            ContractError: In an earlier step, ranks did different things.
        """
        self._steps += 1
        self._is_on = self._ranks > 1
        self.tells_all = self._device.type == "cpu" or self._steps <= FIRST_STEPS
        self._digest = step
        self._look(PENDING_DIGESTS)

    def end_step(self, *, failed: bool) -> None:
        """End the step. After a failure the other ranks may not come this far."""
        if self._is_on and not failed and not self.tells_all:
            self._send()
        self._is_on = False

    def close(self, *, failed: bool) -> None:
        """Training is over.

        Raises:
            ContractError: In one of the last steps, ranks did different things.
        """
        if not failed:
            self.read_all()
        self._on_their_way.clear()

    def read_all(self) -> None:
        """Compare all digests that were sent; waits for the device.

        Raises:
            ContractError: In an earlier step, ranks did different things.
        """
        self._look(0)

    def __call__(self, what: str) -> None:
        """Go on together with the other ranks, which are about to do `what` too.

        Raises:
            ContractError: They are not; says which rank does what.
        """
        if not self._is_on:
            return
        code = zlib.crc32(what.encode(), self._digest)
        if not self.tells_all:
            self._digest = code
            return
        codes = self._of_all(code).tolist()
        if any(other != code for other in codes):
            self._is_on = False
            raise self._differ(what)

    def note(self, what: str) -> None:
        """Compare `what`, which talks to no other rank but changes a shard, with the next that does."""
        if self._is_on:
            self._digest = zlib.crc32(what.encode(), self._digest)

    def _of_all(self, code: int, *, wait: bool = True) -> Any:
        """The codes of all ranks by rank, on the device; with the work that brings them, unless it is waited for."""
        codes = torch.zeros(self._ranks, dtype=torch.int64, device=self._device)
        codes[dist.get_rank(self._group)].fill_(code)  # by a kernel: a copy from the host would wait
        work = dist.all_reduce(codes, group=self._group, async_op=not wait)
        return codes if wait else (codes, work)

    def _send(self) -> None:
        codes, work = self._of_all(self._digest, wait=False)
        work.wait()  # the stream, not the host
        self._on_their_way.append((self._steps, LateCopy(codes)))

    def _look(self, pending: int) -> None:
        """Compare the digests that have arrived; wait for those beyond `pending`."""
        while self._on_their_way and (len(self._on_their_way) > pending or self._on_their_way[0][1].is_there()):
            step, copy = self._on_their_way.popleft()
            codes = copy.read().tolist()
            if any(code != codes[0] for code in codes):
                others = [rank for rank, code in enumerate(codes) if code != codes[0]]
                raise refusal("collective", f"in step {step} of this run, ranks {others} and rank 0")

    def _differ(self, what: str) -> ContractError:
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
            return ContractError(f"Ranks part ways in `train_step`: {text}. {_SKIPPED_ALONE}")
        entry = "unused parameters" if first[0].startswith(USED) and other[0].startswith(USED) else "collective"
        return refusal(entry, text)


def users_line() -> str:
    """The line of the trainer's code that led here: the innermost that belongs neither to genlight nor to torch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_NOT_THE_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def lost_in_buffers(error: RuntimeError, step: int, group: dist.ProcessGroup | None) -> RankFailedError:
    """The error of a rank that gets no buffers, because of `error`; waits some seconds for the other ranks.

    Args:
        error: What the process group raised.
        step: At whose end they were sent.
        group: Of the ranks that get them from its first one; None means all.
    """
    # Other ranks may have them, and see the connection break in the exchange of the next step.
    lost = _who_is_lost(step + 1, group)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    return RankFailedError(
        f"the buffers that rank {source} sends at the end of step {step} did not arrive; {lost} ({error})"
    )


def _who_is_lost(step: int, group: dist.ProcessGroup | None) -> str:
    """Which ranks of `group` do not say that they have seen an exchange of `step` break off."""
    here, key = dist.get_rank(group), f"genlight/exchange that broke off in step {step}"
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    if _tell(f"{key}/{here}", "here"):
        silent = _silent(key, here, len(ranks))
    else:  # the store is kept by a rank that is gone, which torchrun and Lightning make the first one
        silent = [0] if here != 0 else list(range(1, len(ranks)))
    return _about([ranks[rank] for rank in silent], ANSWERED_WITHIN_S)


def _about(lost: Sequence[int], seconds: float) -> str:
    if not lost:
        return "all ranks still run, so it is the connection between them that broke"
    names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
    return f"{names} did not answer within {seconds:.0f} s: lost, or waiting for one that is"


def _silent(key: str, here: int, world_size: int) -> list[int]:
    """Those of the other ranks that have not said "here" under `key`."""
    deadline = time.monotonic() + ANSWERED_WITHIN_S
    return [rank for rank in range(world_size) if rank != here and not _answers(f"{key}/{rank}", deadline)]


def _answers(key: str, deadline: float) -> bool:
    try:
        default_store().wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
    except RuntimeError:
        return False
    return True


def _tell(key: str, text: str) -> bool:
    """Put `text` where other ranks find it; False where the store is gone with the rank that keeps it."""
    try:
        default_store().set(key, text)
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
                "must build the same modules and optimizers, in the same order, on every rank; what is meant to differ "
                "is named in the trainer's `rank_local`."
            )


def _inventory(discovered: Discovered, rank_local: RankLocal) -> list[str]:
    tensors = rank_local.tensors(discovered)
    frozen = {id(p) for found in discovered.modules for p in found.value.parameters() if not p.requires_grad}
    lines = [f"{path} {tuple(t.shape)} {t.dtype}{' frozen' if id(t) in frozen else ''}" for path, t in tensors]
    for found in rank_local.shared(discovered):
        shapes = [[tuple(p.shape) for p in group["params"]] for group in found.value.param_groups]
        lines.append(f"{found.path} {type(found.value).__name__} over {shapes}")
    return lines
