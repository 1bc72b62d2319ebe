"""Curves of metrics, thinned so that every peak stays, in memory that does not grow with the log."""

from __future__ import annotations

import itertools
import math
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Curve"]

MOST_KEPT = 1 << 15
"""How many points a curve holds before it is thinned, to a quarter of them."""


class Curve:
    """The points of one metric, in the order in which they were logged.

    Attributes:
        first_unusual: Step and value of the first value that is not finite; None where all are.
        count: How many values were logged.
    """

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.times_ms: array[int] = array("q")
        self.values: array[float] = array("d")
        self.first_unusual: tuple[int, float] | None = None
        self.count = 0

    def add(self, step: int, time_ms: int, value: float) -> None:
        """Take the next point."""
        self.count += 1
        if not math.isfinite(value) and self.first_unusual is None:
            self.first_unusual = step, value
        self.steps.append(step)
        self.times_ms.append(time_ms)
        self.values.append(value)
        if len(self.values) >= MOST_KEPT:
            self._keep(thinned(np.array(self.values), MOST_KEPT // 4))

    def go_back(self, step: int) -> None:
        """Take back what was logged after `step`, since those steps are made again."""
        kept = np.array(self.steps) <= step
        if not kept.all():
            self._keep(np.flatnonzero(kept))

    def points(self, most: int) -> dict[str, list[Any]]:
        """At most `most` points: ``steps``, ``times`` (milliseconds since 1970), ``values`` (null where not finite)."""
        at = thinned(np.array(self.values), most)
        values = [self.values[index] for index in at]
        return {
            "steps": [self.steps[index] for index in at],
            "times": [self.times_ms[index] for index in at],
            "values": [float(f"{value:.6g}") if math.isfinite(value) else None for value in values],
        }

    def _keep(self, at: NDArray[np.intp]) -> None:
        for name in ("steps", "times_ms", "values"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, np.array(column)[at].tobytes()))


def thinned(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Which of `values` to keep, at most `most` in order: the first, the last, and both extremes of each stretch."""
    if len(values) <= most:
        return np.arange(len(values))
    stretches = max((most - 2) // 2, 1)
    bounds = np.linspace(0, len(values), stretches + 1).astype(np.intp)
    low, high = np.where(np.isfinite(values), values, np.inf), np.where(np.isfinite(values), values, -np.inf)
    kept = {0, len(values) - 1}
    for begin, end in itertools.pairwise(bounds):
        kept |= {int(begin + low[begin:end].argmin()), int(begin + high[begin:end].argmax())}
    return np.array(sorted(kept))
