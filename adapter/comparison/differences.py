"""How far two loops are apart after a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .facts import KINDS, Facts

__all__ = ["Difference", "StepDistances", "compare_facts", "described", "distance"]

NOISE = 1e-5
"""Below this share of the largest first moment, a gradient is the rounding of one that is zero."""


@dataclass(frozen=True)
class Difference:
    """The first value that two loops do not share."""

    step: int
    """Completed steps, or updates where optimizers are compared; 0 is before the first."""
    kind: str
    """One of `KINDS`, ``gradient``, or ``steps``."""
    name: str
    distance: float
    """Relative; infinite where one loop lacks the value, or it is not finite in one of them, or of another shape."""
    plain: str
    """What the plain loop has, in words."""
    hosted: str
    """What genlight has."""
    cause: str
    """What it probably comes from, and what to do."""

    def as_json(self) -> dict[str, Any]:
        """The difference as a JSON object; an infinite distance is null."""
        return {**asdict(self), "distance": self.distance if math.isfinite(self.distance) else None}


@dataclass(frozen=True)
class StepDistances:
    """All distances of one step, largest first within each kind."""

    step: int
    distances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By kind, then by name."""

    def largest(self, kind: str) -> tuple[str, float] | None:
        """The name with the largest distance of a kind, and the distance; None where there is none of that kind."""
        found = self.distances.get(kind)
        return max(found.items(), key=lambda item: item[1]) if found else None

    def beyond(self, rtol: float) -> tuple[str, str, float] | None:
        """Kind, name and size of the first distance beyond `rtol`: of the first kind that has one, the largest."""
        for kind in self.distances:
            worst = self.largest(kind)
            if worst is not None and worst[1] > rtol:
                return kind, *worst
        return None


def compare_facts(
    step: int, plain: Facts, hosted: Facts, *, kinds: Iterable[str] = KINDS, exact: bool = True
) -> StepDistances:
    """How far all values of two loops are apart after `step`.

    A weight, gradient, setting or metric is measured against its own size, an optimizer's state against the largest of
    its name in that optimizer: of a gradient that is zero but for rounding, any two computations have another.

    Args:
        step: Completed steps.
        plain: Of the plain loop.
        hosted: Under genlight.
        kinds: What is compared.
        exact: Whether both compute in the same order and precision. Where they do not, weights whose gradient is
            nothing but rounding are left out: Adam makes whole steps of it.
    """
    noise = frozenset[str]() if exact else _moved_by_noise(plain["optimizer state"])
    distances = {
        kind: {
            name: distance(a.get(name), b.get(name), at_least=scales.get(name))
            for name in [*a, *(name for name in b if name not in a)]
            if not (kind == "weight" and name in noise)
        }
        for kind in kinds
        for a, b in [(plain[kind], hosted[kind])]
        for scales in [_scales(a) if kind == "optimizer state" else {}]
    }
    return StepDistances(step, distances)


def distance(a: Tensor | None, b: Tensor | None, *, at_least: float | None = None) -> float:
    """‖b - a‖ / ‖a‖, in double precision; infinite where only one of them is there, is finite, or has the shape.

    Args:
        a: The reference.
        b: The other.
        at_least: What ``‖a‖`` is at least taken for.
    """
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    kind = torch.cdouble if a.is_complex() or b.is_complex() else torch.double
    a, b = a.to(kind), b.to(kind)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return math.inf
    a, b = a[finite], b[finite]
    apart = float((b - a).norm())
    if apart == 0.0:
        return 0.0
    size = max(float(a.norm()), at_least or 0.0)
    return apart / size if size > 0 else math.inf


def described(tensor: Tensor | None) -> str:
    """A value in a few words: a number, or shape and norm of a tensor."""
    if tensor is None:
        return "absent"
    if tensor.numel() == 1:
        return f"{tensor.item():.8g}" if not tensor.is_complex() else str(tensor.item())
    norm = float(tensor.to(torch.cdouble if tensor.is_complex() else torch.double).norm())
    return f"{'x'.join(map(str, tensor.shape))}, norm {norm:.8g}"


def _scales(states: Mapping[str, Tensor]) -> dict[str, float]:
    """For each state the largest norm of its name in the same optimizer."""
    largest: dict[tuple[str, str], float] = {}
    norms = {name: float(state.to(torch.double).norm()) for name, state in states.items() if not state.is_complex()}
    for name, norm in norms.items():
        if math.isfinite(norm):
            key = _optimizer_and_key(name)
            largest[key] = max(largest.get(key, 0.0), norm)
    return {name: largest.get(_optimizer_and_key(name), 0.0) for name in norms}


def _optimizer_and_key(name: str) -> tuple[str, str]:
    """``state.opt[state.model.0.weight].exp_avg`` is of ``state.opt`` and ``exp_avg``."""
    inner, _, key = name.rpartition(".")
    return inner.partition("[state")[0].partition("[trainer")[0].partition("[param_groups")[0].partition(" [")[0], key


def _moved_by_noise(states: Mapping[str, Tensor]) -> frozenset[str]:
    """Weights whose first moment is nothing beside the largest one."""
    scales = _scales(states)
    found: set[str] = set()
    for name, state in states.items():
        if name.endswith(".exp_avg") and float(state.double().norm()) <= NOISE * scales[name]:
            place = name.removesuffix(".exp_avg")
            found |= {place, place[place.index("[") + 1 : place.rindex("]")]}
    return frozenset(found)
