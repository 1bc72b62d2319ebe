"""Draws in proportion to priorities, and changes of them, in a time that hardly grows with their number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["SumTree"]

FANOUT = 32
"""Children of a node: four levels hold a million leaves, and a level is one NumPy operation for a whole batch."""

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]


class SumTree:
    """Priorities of `size` leaves, all 0 at first, with the sums of their groups, of groups of groups, and so on.

    Sums are always made of their parts anew, so that they depend on the leaves alone and not on what these were before.
    """

    def __init__(self, size: int) -> None:
        self._levels: list[Floats] = []
        count = size
        while not self._levels or count > 1:
            groups = -(-count // FANOUT)
            self._levels.append(np.zeros((groups, FANOUT)))
            count = groups

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._levels[-1].sum())

    def values(self, leaves: Positions) -> Floats:
        """The priorities of `leaves`."""
        found: Floats = self._levels[0].reshape(-1)[leaves]
        return found

    def set(self, leaves: Positions, priorities: Floats | float) -> None:
        """Give `leaves` other priorities; where one is named twice, the last counts."""
        self._levels[0].reshape(-1)[leaves] = priorities
        nodes = np.unique(leaves // FANOUT)
        for level, above in zip(self._levels, self._levels[1:], strict=False):
            above.reshape(-1)[nodes] = level[nodes].sum(axis=1)
            nodes = np.unique(nodes // FANOUT)

    def find(self, targets: Floats) -> Positions:
        """For each target, from 0 to below `total`, the leaf in whose part of the sum of all it lies."""
        nodes: Positions = np.zeros(len(targets), dtype=np.int64)
        rows = np.arange(len(targets))
        left = targets
        for level in reversed(self._levels):
            children = level[nodes]
            ends = children.cumsum(axis=1)
            picked = np.minimum((ends <= left[:, None]).sum(axis=1), FANOUT - 1)
            if not children[rows, picked].all():
                # Rounding has put a target at the very end, behind the last child that has a priority.
                picked = np.minimum(picked, FANOUT - 1 - (children[:, ::-1] > 0).argmax(axis=1))
            left = np.maximum(left - (ends[rows, picked] - children[rows, picked]), 0.0)
            nodes = nodes * FANOUT + picked
        return nodes
