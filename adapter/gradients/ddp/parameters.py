"""Which tensors of a trainer have their gradients averaged, also after it added some or replaced them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ....callbacks.optimizer_state import parameters_of
from ...discovery.discover import Discovered, Found
from ...discovery.rank_local import RankLocal

__all__ = ["AveragedParameters"]


class AveragedParameters:
    """The tensors whose gradients are averaged, as they were at the last `refresh`.

    What an optimizer holds always takes part, and without any optimizer everything does. Other parameters of modules
    and bare tensors may be updated by hand, counted into a norm or copied to others: they take part from their first
    gradient on.

    Args:
        discovered: The trainer's objects. Parameters of its own ``DistributedDataParallel`` modules and sharded ones
            are left to those.
        rank_local: What is each rank's own.

    Attributes:
        all: Those that take part, and those that may; the same list while they are the same.
        waiting: Those that may, by id.
        by_hand: Ids of the tensors that no optimizer holds.
    """

    def __init__(self, discovered: Discovered, rank_local: RankLocal) -> None:
        self._discovered = discovered
        self._rank_local = rank_local
        modules = [m for found in discovered.modules for m in found.value.modules()]
        replicated = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._foreign = {id(p) for m in replicated for p in m.parameters()}
        self._in_groups: list[Tensor] | None = None
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._bare: list[Found[Tensor]] = []
        self._taken_on: set[int] = set()
        self.all: list[Tensor] = []
        self.waiting: dict[int, Tensor] = {}
        self.by_hand: frozenset[int] = frozenset()
        self.refresh()

    def refresh(self) -> bool:
        """Follow parameters that were added, or that took the place of others with the same names; whether any did."""
        in_groups = [p for found in self._discovered.optimizers for p in parameters_of(found.value)]
        before = self._in_groups
        if (
            before is not None
            and len(before) == len(in_groups)
            and all(map(operator.is_, before, in_groups))
            and all(slots.get(name) is parameter for slots, name, parameter in self._slots)
            and all(now.value is each.value for now, each in zip(self._bare_now(), self._bare, strict=True))
        ):
            return False
        self._in_groups = in_groups
        left_out = self._foreign | self._rank_local.ids(self._discovered)
        held = {id(p) for p in in_groups}
        everything = (*in_groups, *(p for _, p in self.named()))
        unique = {id(p): p for p in everything if id(p) not in left_out and not isinstance(p, DTensor)}
        self.all = list(unique.values())
        self.by_hand = frozenset(unique.keys() - held)
        self._taken_on &= self.by_hand
        may_wait = self.by_hand - self._taken_on if self._discovered.optimizers else frozenset()
        self.waiting = {key: p for key, p in unique.items() if key in may_wait}
        self._slots = [
            (m._parameters, name, p)
            for found in self._discovered.modules
            for m in found.value.modules()
            for name, p in m._parameters.items()
            if p is not None and id(p) in self.by_hand
        ]
        bare = self._discovered.current(self._discovered.tensors)
        self._bare = [each for each in bare if id(each.value) in self.by_hand]
        return True

    def take_on(self, key: int) -> None:
        """Have the tensor with this id, which was waiting, take part from now on."""
        del self.waiting[key]
        self._taken_on.add(key)

    def _bare_now(self) -> list[Found[Tensor]]:
        return self._discovered.current(self._bare) if self._bare else []

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of modules and bare tensors, with their paths; not those that an optimizer alone knows."""
        for found in self._discovered.modules:
            yield from self._rank_local.parameters(found)
        yield from self._rank_local.bare(self._discovered)
