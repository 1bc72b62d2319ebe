"""Faults of training: what a check has read, what earlier checks have left, and which faults there are; plain data."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, get_args

__all__ = [
    "FAULT_KINDS",
    "RUNGS",
    "Fault",
    "FaultKind",
    "FaultLog",
    "History",
    "Limits",
    "Reading",
    "Rung",
    "as_maximum",
    "from_maximum",
]

FaultKind = Literal["nonfinite", "loss_spike", "exploding_gradients"]
FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
"""The faults of an update that `Recover` may react to."""

Rung = Literal["skip", "lower_lr", "roll_back"]
RUNGS: Final[tuple[Rung, ...]] = get_args(Rung)
"""The actions that `Recover` may take about a fault."""

LOSSES_KEPT = 256
NORMS_KEPT = 20
COOL_DOWN_CHECKS = 2
"""After how many checks in a row without it a fault is over."""


@dataclass(frozen=True)
class Limits:
    """The limits that a run may set: from where on gradients vanish, and latent values have collapsed."""

    gradient_min_norm: float = 1e-8
    latent_std_min: float = 1e-6


@dataclass(frozen=True)
class Reading:
    """One check, of one rank or over all of them."""

    step: int
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    """L2 norm of each parameter's gradient as its update used it, 0.0 where it had none; empty without an update.

    Of a sharded parameter that of the rank where it is largest. A norm that is not finite is ``nan``.
    """
    update_ratio: float | None = None
    """Norm of the update over norm of the weights, of samples of them."""
    weights_are_finite: bool = True
    """Before the update; of samples."""
    losses: Sequence[tuple[int, float]] = ()
    """Steps since the last check with their loss, the largest of all ranks; ``nan`` where it is not finite."""
    highest_rate: float | None = None
    """Learning rate with which the update was made; the highest of all groups."""
    latent: tuple[str, float] | None = None
    """Name and value of a metric for the spread of latent values, a variance as its root."""
    step_seconds: Sequence[float | None] = ()
    """Of each rank: from one update to the last gradient before the next, without the wait for other ranks."""
    hosts: Sequence[str] = ()
    """Of each rank."""
    batch: float | None = None
    """A number that is equal for equal batches; None over all ranks, or where a batch does not say."""
    repeats_batch: bool = False
    """Whether a rank got the same batch twice in a row."""
    ranks_share_batch: bool = False
    """Whether all ranks got the same batch."""
    forward_origin: str | None = None
    """The first module whose output was not finite at the check."""
    backward_origin: str | None = None
    """The module whose backward was the first to give a gradient that is not finite."""
    origin_step: int | None = None
    """The step in which those were seen."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    kind: str
    """``vanishing_gradients``, ``loss_spike`` and so on."""
    text: str
    suggestions: tuple[str, ...]
    figures: Mapping[str, Any]
    """The numbers behind it."""
    step: int = 0
    """The check at which it was found."""
    is_over: bool = False


class History:
    """The memory of the rules of earlier checks; plain data, saved in checkpoints."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        self.largest_norms: deque[float] = deque(maxlen=NORMS_KEPT)
        self.checks_without_gradient: dict[str, int] = {}
        self.rate: float | None = None
        self.rate_has_fallen = False
        self.step_seconds: list[float | None] = []

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`."""
        return {**vars(self), "losses": list(self.losses), "largest_norms": list(self.largest_norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint holds; entries of another version are left out."""
        for name in vars(self).keys() & state.keys():
            kept = getattr(self, name)
            setattr(self, name, deque(state[name], kept.maxlen) if isinstance(kept, deque) else state[name])

    def add(self, reading: Reading) -> None:
        """Take over `reading`, once the rules have judged it."""
        finite = [loss for _, loss in reading.losses if loss == loss]
        # A spike belongs to the spread of the losses before it no more than a loss that is not finite.
        self.losses.extend(finite)
        norms = [norm for norm in reading.gradient_norms.values() if norm == norm]
        if norms:
            self.largest_norms.append(max(norms))
        for name, norm in reading.gradient_norms.items():
            self.checks_without_gradient[name] = 0 if norm else self.checks_without_gradient.get(name, 0) + 1
        self.step_seconds = list(reading.step_seconds)
        if reading.highest_rate is not None:
            before, self.rate = self.rate, reading.highest_rate
            self.rate_has_fallen = self.rate_has_fallen or (before is not None and self.rate < before)

    def spread(self) -> tuple[float, float] | None:
        """Median of the losses before this check, and their standard deviation by the median of the deviations.

        That factor is 1.4826 for normally distributed values (Rousseeuw and Croux 1993). None with fewer than 32.
        """
        if len(self.losses) < 32:
            return None
        median = statistics.median(self.losses)
        deviation = statistics.median(abs(loss - median) for loss in self.losses)
        return median, 1.4826 * deviation


def as_maximum(value: float | None) -> float:
    """A number of which the largest of all ranks can be taken: infinite where `value` is not finite, or is None."""
    return -math.inf if value is None else value if math.isfinite(value) else math.inf


def from_maximum(largest: float) -> float | None:
    """The largest number of all ranks; ``nan`` where one is not finite, None where there is none."""
    return None if largest == -math.inf else math.nan if largest == math.inf else largest


class FaultLog:
    """The faults that have begun and not ended; one that comes and goes is reported once."""

    def __init__(self) -> None:
        self.active: dict[str, Fault] = {}
        """By kind, as each was when it began."""
        self._clean_checks: dict[str, int] = {}

    def update(self, found: Iterable[Fault], step: int) -> list[Fault]:
        """Take over what a check has found.

        Returns:
            The faults that begin, and those that are over, as each was when it began.
        """
        now = {fault.kind: fault for fault in found}
        begins = [fault for kind, fault in now.items() if kind not in self.active]
        self.active.update((fault.kind, fault) for fault in begins)
        over = []
        for kind in list(self.active):
            self._clean_checks[kind] = 0 if kind in now else self._clean_checks.get(kind, 0) + 1
            if self._clean_checks[kind] >= COOL_DOWN_CHECKS:
                del self._clean_checks[kind]
                over.append(replace(self.active.pop(kind), is_over=True))
        return [*begins, *over]

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`: plain data."""
        active = [{**asdict(fault), "suggestions": list(fault.suggestions)} for fault in self.active.values()]
        return {"active": active, "clean_checks": dict(self._clean_checks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint holds."""
        faults = [Fault(**{**saved, "suggestions": tuple(saved["suggestions"])}) for saved in state["active"]]
        self.active = {fault.kind: fault for fault in faults}
        self._clean_checks = dict(state["clean_checks"])
