"""Ranks that do different things with sharded modules, told by name.

A call of a unit, a backward, an update and a look at a norm each talk to the other ranks. A rank that comes with
another one would wait for ever, or mix up two tensors of one shape. So ranks compare what they are about to do:

    on the CPU, and on a device in the first steps      before it, by a message: the error names who does what
    on a device, after that                             a digest of the whole step, sent without waiting for the
                                                        device, and looked at in a later step

A message before each would wait for the device each time; a branch that differs by rank is mostly taken at once.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from ...contract.exceptions import ContractError
from ...plumbing.devices import LateCopy
from ..ddp.rank_check import SKIPPED_ALONE, users_line
from ..refused import refusal

__all__ = ["BACKWARD", "END_OF_STEP", "UPDATE", "USED", "RankAgreement"]

END_OF_STEP, BACKWARD, UPDATE, USED = "end the step", "call backward", "update by", "leave gradients of"
"""How the messages begin that are about a whole step."""

FIRST_STEPS = 3
"""Steps in which ranks on a device tell each other all that they are about to do."""
PENDING = 8
"""Digests that may be on their way; a step waits for the oldest of more, which is there by then."""


class RankAgreement:
    """Called by every rank with what takes all of them.

    Args:
        group: The ranks.
        device: Where messages between them are.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_world_size(group)
        self._tells_all = self._is_on = False
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
        self._tells_all = self._device.type == "cpu" or self._steps <= FIRST_STEPS
        self._digest = step
        self._look(PENDING)

    def end_step(self, *, failed: bool) -> None:
        """What follows is not part of a step. After a failure the other ranks may not come this far."""
        if self._is_on and not failed and not self._tells_all:
            self._send()
        self._is_on = False

    def close(self, *, failed: bool) -> None:
        """Training is over.

        Raises:
            ContractError: In one of the last steps, ranks did different things.
        """
        if not failed:
            self._look(0)
        self._on_their_way.clear()

    def __call__(self, what: str) -> None:
        """Go on together with the other ranks, which are about to do `what` too.

        Raises:
            ContractError: They are not; says which rank does what.
        """
        if not self._is_on:
            return
        code = zlib.crc32(what.encode(), self._digest)
        if not self._tells_all:
            self._digest = code
            return
        codes = self._of_all(code).tolist()
        if any(other != code for other in codes):
            self._is_on = False
            raise self._parted(what)

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

    def _parted(self, what: str) -> ContractError:
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, (what, "" if what == END_OF_STEP else users_line()), group=self._group)
        first = everyone[0]
        others = ((rank, other) for rank, other in enumerate(everyone) if other[0] != first[0])
        rank, other = next(others, (1, everyone[1]))
        lines = "".join(f". Rank {r} is at {line}" for r, (_, line) in ((0, first), (rank, other)) if line)
        if first[0] == other[0]:
            return refusal("collective", f"one of ranks 0 and {rank} wrote to shards before they {first[0]}")
        text = f"rank 0 is about to {first[0]}, rank {rank} to {other[0]}{lines}"
        doing = first[0] if other[0] == END_OF_STEP else other[0]
        if END_OF_STEP in (first[0], other[0]) and doing.startswith((BACKWARD, UPDATE)):
            return ContractError(f"Ranks part ways in `train_step`: {text}. {SKIPPED_ALONE}")
        entry = "unused parameters" if first[0].startswith(USED) and other[0].startswith(USED) else "collective"
        return refusal(entry, text)
