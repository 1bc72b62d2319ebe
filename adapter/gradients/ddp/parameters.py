"""Selects the tensors of a trainer whose gradients are averaged; follows tensors that it adds or replaces."""

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


class AveragedParameters:
    """The tensors whose gradients are averaged, as they were at the last `refresh`.

    Parameters of an optimizer are always averaged; without any optimizer, all parameters are. Other parameters of
    modules and bare tensors may be updated by hand, be part of a norm, or be copied to others: they are averaged from
    their first gradient on.

    Args:
        discovered: The trainer's objects. Sharded parameters, and the parameters of ``DistributedDataParallel``
            modules in the class, are skipped, since torch averages their gradients.
        rank_local: Objects that differ by rank on purpose.

    Attributes:
        all: Tensors that are averaged, and candidates; the same list object while they do not change.
        candidates: Tensors that are averaged from their first gradient on, by id.
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
        self._included: set[int] = set()
        self.all: list[Tensor] = []
        self.candidates: dict[int, Tensor] = {}
        self.by_hand: frozenset[int] = frozenset()
        self.refresh()

    def refresh(self) -> bool:
        """Find parameters that were added, or that replaced others of the same name; return whether there are any."""
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
        skipped = self._foreign | self._rank_local.ids(self._discovered)
        held = {id(p) for p in in_groups}
        everything = (*in_groups, *(p for _, p in self.named()))
        unique = {id(p): p for p in everything if id(p) not in skipped and not isinstance(p, DTensor)}
        self.all = list(unique.values())
        self.by_hand = frozenset(unique.keys() - held)
        self._included &= self.by_hand
        candidates = self.by_hand - self._included if self._discovered.optimizers else frozenset()
        self.candidates = {key: p for key, p in unique.items() if key in candidates}
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

    def include(self, key: int) -> None:
        """Average the candidate with this id from now on."""
        del self.candidates[key]
        self._included.add(key)

    def _bare_now(self) -> list[Found[Tensor]]:
        return self._discovered.current(self._bare) if self._bare else []

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters of modules and bare tensors with their paths; skips tensors that only an optimizer has."""
        for found in self._discovered.modules:
            yield from self._rank_local.parameters(found)
        yield from self._rank_local.bare(self._discovered)
