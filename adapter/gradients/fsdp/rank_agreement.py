"""Ranks that tell each other what they are about to do together, so that one that does something else is told by name.

Where modules are sharded, a call, a backward, an update and a look at a norm each talk to the other ranks. A rank that
comes with another one would wait for half an hour, have the process aborted by the library, or mix up two tensors of
one shape. A message of eight bytes before each costs nothing that matters on a CPU. On a GPU it would wait for the
device, so there it is sent in the first steps, and in each that is a power of two.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from ...contract.exceptions import ContractError
from ..ddp.rank_check import SKIPPED_ALONE, users_line

__all__ = ["BACKWARD", "END_OF_STEP", "UPDATE", "RankAgreement"]

END_OF_STEP, BACKWARD, UPDATE = "end the step", "call backward", "update by"
"""How the messages begin that are about a whole step."""

FIRST_STEPS = 3
"""Steps in which ranks on GPUs agree on everything."""


class RankAgreement:
    """Called by every rank before what takes all of them.

    Args:
        group: The ranks.
        device: Where messages between them are.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._world_size = dist.get_world_size(group)
        self._is_on = False

    def begin_step(self, step: int) -> None:
        """A step begins, its number is equal on all ranks."""
        often = self._device.type == "cpu" or step <= FIRST_STEPS or step & (step - 1) == 0
        self._is_on = often and self._world_size > 1

    def end_step(self) -> None:
        """What follows is not part of a step."""
        self._is_on = False

    def __call__(self, what: str) -> None:
        """Go on together with the other ranks, which are about to do `what` too.

        Raises:
            ContractError: They are not; says which rank does what.
        """
        if not self._is_on:
            return
        mine = torch.tensor([zlib.crc32(what.encode())], dtype=torch.int64, device=self._device)
        all_of_them = torch.empty(self._world_size, dtype=torch.int64, device=self._device)
        dist.all_gather_single(all_of_them, mine, group=self._group)
        digests = all_of_them.tolist()
        if any(digest != digests[0] for digest in digests):
            self._is_on = False
            raise self._parted(what)

    def _parted(self, what: str) -> ContractError:
        everyone: list[Any] = [None] * self._world_size
        where = "" if what == END_OF_STEP else users_line()
        dist.all_gather_object(everyone, (what, where), group=self._group)
        first = everyone[0]
        rank, other = next((rank, other) for rank, other in enumerate(everyone) if other[0] != first[0])
        lines = [f"Rank {r} is at {line}." for r, (_, line) in ((0, first), (rank, other)) if line]
        text = f"Ranks part ways in `train_step`: rank 0 is about to {first[0]}, rank {rank} to {other[0]}."
        at = "".join(f" {line}" for line in lines)
        doing = first[0] if other[0] == END_OF_STEP else other[0]
        if END_OF_STEP in (first[0], other[0]) and doing.startswith((BACKWARD, UPDATE)):
            return ContractError(f"{text}{at} {SKIPPED_ALONE}")
        return ContractError(
            f"{text} What talks to the other ranks (calls of sharded modules, backward, updates, values of sharded "
            "tensors) all ranks must do, in the same order. Put modules of which ranks choose into one nn.ModuleList "
            "or nn.ModuleDict, which is gathered as one, and leave them out of the shard policy; let an optimizer "
            f"update each parameter on all ranks; or use ddp.{at}"
        )
