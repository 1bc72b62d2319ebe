"""Checks that ranks with sharded modules start the same collective operations; names ranks that diverged."""

from __future__ import annotations

import zlib
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from ..contract.exceptions import ContractError
from ..plumbing.devices import LateCopy, gather_objects
from .rank_check import FIRST_STEPS, find_user_line
from .refused import SKIP_HINT, refusal

END_OF_STEP, BACKWARD, UPDATE, USED = "end the step", "call backward", "update by", "leave gradients of"
"""First words of operations for which `RankAgreement` has separate messages."""

PENDING_DIGESTS = 8
"""Digests that may be in flight. With more, a step waits for the oldest one; usually that has arrived by then."""


class RankAgreement:
    """Compares the collective operations of ranks whose modules are sharded; each rank calls it before each operation.

    A call of a unit, a backward call, an update and the read of a norm are collective. Ranks that start different
    operations would wait forever, or mix up two tensors of the same shape. So they compare what they start::

        on the CPU, and on a device in the first steps    by a message before each: the error names the operations
        on a device, after that                           by a digest of the complete step, sent without waiting for
                                                          the device and compared in a later step

    A message before each operation would wait for the device each time. The first steps find most faults: a branch that
    differs by rank is usually taken in one of them.

    Args:
        group: The ranks; None means all.
        device: Device of the messages between them.
        several_ranks: Whether there are other ranks; without any, there is nothing to compare.

    Attributes:
        compares_each: Whether ranks compare each operation of the running step by a message.
        in_update: Whether an optimizer runs. Its writes are not recorded, because compiled code does not report them,
            and one rank may compile an optimizer earlier than another.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, several_ranks: bool) -> None:
        self._group = group
        self._device = device
        self._ranks = dist.get_world_size(group) if several_ranks else 1
        self.compares_each = self._is_on = self.in_update = False
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
        self.compares_each = self._is_on and (self._device.type == "cpu" or self._steps <= FIRST_STEPS)
        self._digest = step
        self._compare(PENDING_DIGESTS)

    def end_step(self, *, failed: bool) -> None:
        """End the step. After a failure the other ranks may not reach this point, so nothing is sent."""
        if self._is_on and not failed and not self.compares_each:
            self._in_flight.append((self._steps, LateCopy(self._gather(self._digest))))
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
        """Wait until every rank is about to do `what`; after the first steps on a device, add it only to the digest.

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
        if self._is_on and not self.in_update:
            self._digest = zlib.crc32(what.encode(), self._digest)

    def _gather(self, code: int) -> Tensor:
        """Return the codes of all ranks, on the device; the stream waits for them, but the host does not."""
        codes = torch.zeros(self._ranks, dtype=torch.int64, device=self._device)
        codes[dist.get_rank(self._group)].fill_(code)  # only starts a kernel; a copy from the host would wait
        dist.all_reduce(codes, group=self._group)
        return codes

    def _compare(self, pending: int) -> None:
        """Compare the digests that have arrived; wait until at most `pending` are in flight."""
        while self._in_flight and (len(self._in_flight) > pending or self._in_flight[0][1].is_there()):
            step, copy = self._in_flight.popleft()
            codes = copy.read().tolist()
            if any(code != codes[0] for code in codes):
                others = [rank for rank, code in enumerate(codes) if code != codes[0]]
                raise refusal("collective", f"in step {step} of this run, ranks {others} and rank 0")

    def _different(self, what: str) -> ContractError:
        """Return the error for ranks that start different operations. Collective."""
        everyone = gather_objects((what, "" if what == END_OF_STEP else find_user_line()), self._group)
        first = everyone[0]
        others = ((rank, other) for rank, other in enumerate(everyone) if other[0] != first[0])
        rank, other = next(others, (1, everyone[1]))
        lines = "".join(f". Rank {r} is at {line}" for r, (_, line) in ((0, first), (rank, other)) if line)
        if first[0] == other[0]:
            return refusal("collective", f"one of ranks 0 and {rank} wrote to shards before they {first[0]}")
        text = f"rank 0 is about to {first[0]}, rank {rank} to {other[0]}{lines}"
        doing = first[0] if other[0] == END_OF_STEP else other[0]
        if END_OF_STEP in (first[0], other[0]) and doing.startswith((BACKWARD, UPDATE)):
            return ContractError(f"Ranks diverged in `train_step`: {text}. {SKIP_HINT}")
        entry = "unused parameters" if first[0].startswith(USED) and other[0].startswith(USED) else "collective"
        return refusal(entry, text)
