"""Draws in proportion to priorities, and changes of them, in a time that hardly grows with their number."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["SumTree"]

FANOUT = 32
"""Children of a node: a level is a few operations of torch for a whole batch."""
MOST_AT_TOP = 1024
"""The top has no nodes: sums up to each of so many entries take less time than two levels."""
MOST_NODES_TO_SUM_AGAIN = 1024
"""Up to so many nodes, summing one twice takes less time than finding out that it comes twice."""

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]


class SumTree:
    """Priorities of `size` leaves, all 0 at first, with the sums of their groups, of groups of groups, and so on.

    Sums are always made of their parts anew, so that they depend on the leaves alone and not on what these were before.
    """

    def __init__(self, size: int) -> None:
        self._levels: list[Floats] = []
        count = size
        while not self._levels or count > MOST_AT_TOP:
            groups = -(-count // FANOUT)
            self._levels.append(np.zeros((groups, FANOUT)))
            count = groups
        self._top = np.zeros(count)
        self._tensors = [torch.from_numpy(level) for level in self._levels]
        self._top_tensor = torch.from_numpy(self._top)

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._top_tensor.cumsum(0)[-1])

    def values(self, leaves: Positions) -> Floats:
        """The priorities of `leaves`."""
        found: Floats = self._levels[0].reshape(-1)[leaves]
        return found

    def set(self, leaves: Positions, priorities: Floats | float) -> None:
        """Give `leaves` other priorities; where one is named twice, the last counts."""
        self._levels[0].reshape(-1)[leaves] = priorities
        nodes = leaves // FANOUT
        for level, above in zip(self._levels, [*self._levels[1:], self._top], strict=True):
            if len(nodes) > MOST_NODES_TO_SUM_AGAIN:
                nodes = np.unique(nodes)
            above.reshape(-1)[nodes] = level[nodes].sum(axis=1)
            nodes = nodes // FANOUT

    def find(self, targets: Floats) -> Positions:
        """For each target, from 0 to below `total`, the leaf in whose part of the sum of all it lies."""
        left = torch.from_numpy(targets)
        ends = self._top_tensor.cumsum(0)
        picked = _first_above(ends, left)
        left, nodes = left - (ends[picked] - self._top_tensor[picked]), picked
        for level in reversed(self._tensors):
            children = level[nodes]
            ends = children.cumsum(1)
            in_row = _first_above(ends, left.clamp_(min=0.0)[:, None])
            left = left - (ends.gather(1, in_row) - children.gather(1, in_row))[:, 0]
            nodes = nodes * FANOUT + in_row[:, 0]
        found: Positions = nodes.numpy()
        return found


def _first_above(ends: Tensor, targets: Tensor) -> Tensor:
    """In rows of growing numbers, the place of the first one above the target."""
    places = torch.searchsorted(ends, targets, right=True)
    if places.numel() and int(places.max()) == ends.shape[-1]:
        # Rounding has put a target at the very end, behind the last entry that has a priority.
        places = torch.minimum(places, torch.searchsorted(ends, ends[..., -1:]))
    return places
