"""Which tensors of a trainer have their gradients averaged, also after it added some or replaced them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...discovery.current_tensors import current
from ...discovery.discover import Discovered, Found
from ...discovery.rank_local import RankLocal

__all__ = ["AveragedParameters"]


class AveragedParameters:
    """The tensors whose gradients are averaged, as they were at the last `refresh`.

    Args:
        discovered: The trainer's objects. Parameters of its own ``DistributedDataParallel`` modules and sharded ones
            are left to those.
        rank_local: What is each rank's own.

    Attributes:
        always: What takes part in each exchange: what optimizers hold, without any optimizer everything, and what was
            taken on.
        others: The rest.
        all: Both; the same list while they are the same.
        by_hand: Ids of the tensors that no optimizer holds.
    """

    def __init__(self, discovered: Discovered, rank_local: RankLocal) -> None:
        self._discovered = discovered
        self._rank_local = rank_local
        self._foreign = {id(p) for m in _replicated_by_themselves(discovered) for p in m.parameters()}
        self._in_groups: list[Tensor] | None = None
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._bare: list[Found[Tensor]] = []
        self._taken_on: dict[int, Tensor] = {}
        self.always: list[Tensor] = []
        self.others: list[Tensor] = []
        self.all: list[Tensor] = []
        self.by_hand: frozenset[int] = frozenset()
        self.refresh()

    def refresh(self) -> bool:
        """Follow parameters that were added, or that took the place of others with the same names; whether any did."""
        in_groups = [
            p for found in self._discovered.optimizers for group in found.value.param_groups for p in group["params"]
        ]
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
        others = [p for _, p in self.outside_of_optimizers() if id(p) not in held]
        unique = {id(p): p for p in (*in_groups, *others) if id(p) not in left_out and not isinstance(p, DTensor)}
        self.by_hand = frozenset(unique.keys() - held)
        self._taken_on = {key: p for key, p in self._taken_on.items() if key in unique}
        always = held | self._taken_on.keys() if self._discovered.optimizers else unique.keys()
        self._divide(unique.values(), always)
        self._slots = [
            (m._parameters, name, p)
            for found in self._discovered.modules
            for m in found.value.modules()
            for name, p in m._parameters.items()
            if p is not None and id(p) in self.by_hand
        ]
        bare = current(self._discovered, self._discovered.tensors)
        self._bare = [each for each in bare if id(each.value) in self.by_hand]
        return True

    def take_on(self, tensors: Iterable[Tensor]) -> None:
        """Have `tensors`, which are among the others, take part in each exchange from now on."""
        self._taken_on |= {id(tensor): tensor for tensor in tensors}
        self._divide(self.all, {id(p) for p in self.always} | self._taken_on.keys())

    def _divide(self, tensors: Iterable[Tensor], always: Collection[int]) -> None:
        everything = list(tensors)
        self.always = [p for p in everything if id(p) in always]
        self.others = [p for p in everything if id(p) not in always]
        self.all = self.always + self.others

    def _bare_now(self) -> list[Found[Tensor]]:
        return current(self._discovered, self._bare) if self._bare else []

    def outside_of_optimizers(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of modules and bare tensors, with their paths; some of them may be held by an optimizer, too."""
        for found in self._discovered.modules:
            yield from self._rank_local.parameters(found)
        yield from self._rank_local.bare(self._discovered)


def _replicated_by_themselves(discovered: Discovered) -> Iterator[nn.Module]:
    for found in discovered.modules:
        yield from (m for m in found.value.modules() if isinstance(m, DistributedDataParallel))
