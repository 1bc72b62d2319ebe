"""Turn the readings of a check into faults; one rule per kind of fault."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...adapter.plumbing.text import list_first

LOSSES_KEPT = 256
NORMS_KEPT = 20
NORMS_FOR_MEDIAN = 5
COOL_DOWN_CHECKS = 2
"""A fault has ended after this many checks in a row without it."""
MOST_NAMES = 5
EXPLODES_BY = 100.0
"""A gradient explodes if its norm is this many times the usual largest norm."""
SMALLEST_EXPLOSION = 1.0
"""Below this norm a gradient never counts as exploding, even if gradients were tiny before, as in a converged run."""
LARGEST_NORM = 1e4
"""Above this norm a gradient always counts as exploding."""
DEAD_CHECKS = 3
"""Number of checks in a row without a gradient after which a parameter is dead."""
SMALLEST_UPDATE, LARGEST_UPDATE = 1e-8, 0.3
"""Limits on the norm of an update, as a share of the norm of the weights."""
SPIKE_DEVIATIONS = 8.0
"""A loss is a spike if it is this many standard deviations above the median."""
LOSSES_FOR_SPREAD = 32
SMALLEST_SPREAD = 0.01
"""Minimum spread of losses, as a share of the median loss, if they hardly vary."""
STRAGGLER_FACTOR = 2.0
"""A rank is a straggler if it takes this many times as long as the others."""
STRAGGLES_BY_S = 0.002
"""A rank that is slower by less than this is not reported."""


@dataclass(frozen=True)
class Reading:
    """The readings at a check, of one rank or merged over all. A number that is not finite or not known is ``nan``."""

    step: int
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    """L2 norm of each parameter's gradient as its update used it, 0.0 if it had none; empty without an update.

    For a sharded parameter, the largest norm of any rank.
    """
    losses: Sequence[tuple[int, float]] = ()
    """Steps since the last check with their loss, the largest of all ranks."""
    update_ratio: float = math.nan
    """Norm of the update divided by the norm of the weights, both from samples."""
    rate: float = math.nan
    """Learning rate with which the update was made; the highest of all groups."""
    latent: tuple[str, float] | None = None
    """Name of a metric for the spread of latent values, and the standard deviation that it reports."""
    origin: tuple[int, bool, str] | None = None
    """The first module with a value that is not finite: the step, whether it was in the backward, and its name."""
    ranks: Sequence[tuple[str, float]] = ()
    """Host of each rank, and its seconds from one update to the last gradient before the next."""
    batches: Sequence[tuple[float, ...]] = ()
    """Digests of the last two batches of each rank; an empty tuple for a rank whose digests are not both known."""

    @property
    def largest_norm(self) -> float:
        """The largest gradient norm; ``nan`` if one is ``nan``."""
        return _largest(*self.gradient_norms.values())

    @classmethod
    def of_ranks(cls, readings: Sequence[Reading]) -> Reading:
        """Return the reading over all ranks; values that ranks share come from the first."""
        norms: dict[str, float] = {}
        losses: dict[int, float] = {}
        for reading in readings:
            for name, norm in reading.gradient_norms.items():
                norms[name] = _largest(norms.get(name, 0.0), norm)
            for step, loss in reading.losses:
                losses[step] = _largest(losses.get(step, -math.inf), loss)
        return replace(
            readings[0],
            gradient_norms=norms,
            losses=sorted(losses.items()),
            # Of the same step, the forward (False) comes first: a nan there also makes the backward nan.
            origin=min((reading.origin for reading in readings if reading.origin is not None), default=None),
            ranks=[each for reading in readings for each in reading.ranks],
            batches=[each for reading in readings for each in reading.batches],
        )


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in training."""

    kind: str
    """``vanishing_gradients``, ``loss_spike`` and so on."""
    text: str
    suggestions: tuple[str, ...]
    figures: Mapping[str, Any]
    """The numbers behind it."""
    step: int
    """Completed steps at the check that found it."""
    is_over: bool = False


@dataclass
class History:
    """Results of earlier checks that the rules need, and the faults that have not ended; saved in checkpoints."""

    losses: list[float] = field(default_factory=list)
    largest_norms: list[float] = field(default_factory=list)
    checks_without_gradient: dict[str, int] = field(default_factory=dict)
    rate: float | None = None
    rate_has_fallen: bool = False
    slow_rank: int | None = None
    active: dict[str, Fault] = field(default_factory=dict)
    """The faults that have begun and not ended, by kind, as they were when they began."""
    clean_checks: dict[str, int] = field(default_factory=dict)

    def add(self, reading: Reading) -> None:
        """Add `reading`, once the rules have judged it."""
        self.losses = [*self.losses, *(loss for _, loss in reading.losses if loss == loss)][-LOSSES_KEPT:]
        norms = [norm for norm in reading.gradient_norms.values() if norm == norm]
        self.largest_norms = [*self.largest_norms, *([max(norms)] if norms else [])][-NORMS_KEPT:]
        for name, norm in reading.gradient_norms.items():
            self.checks_without_gradient[name] = 0 if norm else self.checks_without_gradient.get(name, 0) + 1
        self.slow_rank = _slow_rank(reading)
        if reading.rate == reading.rate:
            self.rate_has_fallen = self.rate_has_fallen or (self.rate is not None and reading.rate < self.rate)
            self.rate = reading.rate

    def note_faults(self, found: Sequence[Fault]) -> list[Fault]:
        """Add the faults of a check.

        Returns:
            The faults that begin now, and the faults that have ended: unchanged since they began, but with ``is_over``.
        """
        now = {fault.kind: fault for fault in found}
        begins = [fault for kind, fault in now.items() if kind not in self.active]
        self.active.update((fault.kind, fault) for fault in begins)
        self.clean_checks = {kind: 0 if kind in now else self.clean_checks.get(kind, 0) + 1 for kind in self.active}
        over = [kind for kind, checks in self.clean_checks.items() if checks >= COOL_DOWN_CHECKS]
        return [*begins, *(replace(self.active.pop(kind), is_over=True) for kind in over)]


@dataclass(frozen=True)
class Case:
    """The input of the rules: a reading, the history, and the limits that a run may set."""

    now: Reading
    before: History
    gradient_min_norm: float = 1e-8
    latent_std_min: float = 1e-6


Found = Iterator[tuple[str, dict[str, Any]]]
"""Yields at most one fault: its description and the numbers behind it."""
Rule = Callable[[Case], Found]

RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {}
"""The rule for each kind of fault, and the suggestions for the user."""


def find_faults(case: Case, kinds: Collection[str] = RULES.keys()) -> list[Fault]:
    """Return the faults of these `kinds`."""
    return [
        Fault(kind, text, suggestions, figures, case.now.step)
        for kind, (rule, suggestions) in RULES.items()
        if kind in kinds
        for text, figures in rule(case)
    ]


def _rule(*suggestions: str) -> Callable[[Rule], Rule]:
    def note(rule: Rule) -> Rule:
        RULES[rule.__name__] = rule, suggestions
        return rule

    return note


@_rule(
    "Lower the learning rate, or warm it up for longer.",
    "Look for a division by zero, a logarithm or a root of a value <= 0, or an overflow of fp16.",
    "If no module is named: run again from an earlier checkpoint with `trace_modules=True`.",
)
def nonfinite_loss(case: Case) -> Found:
    """A loss that is nan or infinite, in any step since the last check."""
    step = _first_broken_step(case.now)
    if step is not None:
        origin, figures = _origin(case.now)
        yield f"the loss is not finite since step {step}{origin}", {"first_step": step, **figures}


@_rule(
    "Skip such an update: `if torch.isfinite(loss): optimizer.step()`.",
    "Clip gradients, and lower the learning rate.",
    "If no module is named: run again from an earlier checkpoint with `trace_modules=True`.",
)
def nonfinite_gradients(case: Case) -> Found:
    """A gradient that is nan or infinite when its update is made."""
    bad = [name for name, norm in case.now.gradient_norms.items() if math.isnan(norm)]
    if bad:
        origin, figures = _origin(case.now)
        yield f"gradients are not finite: {_list_names(bad)}{origin}", {**_name_figures(bad), **figures}


@_rule(
    "Check that the loss depends on the parameters: no `detach()`, `no_grad()` or constant in between.",
    "Look for saturated activations; normalise layers, or initialise them differently.",
)
def vanishing_gradients(case: Case) -> Found:
    """Even the largest gradient is almost zero."""
    largest, least = case.now.largest_norm, case.gradient_min_norm
    if largest < least:
        figures = {"largest_norm": largest, "gradient_min_norm": least}
        yield f"the largest gradient has a norm of {largest:.3g}, below {least:.3g}", figures


@_rule("Clip gradients (`torch.nn.utils.clip_grad_norm_`).", "Lower the learning rate, or warm it up for longer.")
def exploding_gradients(case: Case) -> Found:
    """A gradient is very large, or far larger than gradients of this run were."""
    norms, largest, limit = case.now.gradient_norms, case.now.largest_norm, LARGEST_NORM
    enough = len(case.before.largest_norms) >= NORMS_FOR_MEDIAN
    usual = statistics.median(case.before.largest_norms) if enough else 0.0
    if usual:
        limit = min(limit, max(EXPLODES_BY * usual, SMALLEST_EXPLOSION))
    if largest > limit:
        name = max(norms, key=norms.__getitem__)
        figures = {"parameter": name, "largest_norm": largest, "limit": limit}
        yield f"the gradient of {name!r} has a norm of {largest:.3g}, above {limit:.3g}", figures


@_rule(
    "Check that the forward uses them, and that nothing detaches them from the loss.",
    "If a ReLU never fires: lower the learning rate, or use LeakyReLU or GELU.",
    "Parameters that are not to be trained: `requires_grad_(False)`.",
)
def dead_parameters(case: Case) -> Found:
    """Parameters that an optimizer holds get no gradient for several checks."""
    without = [name for name, norm in case.now.gradient_norms.items() if not norm]
    dead = [name for name in without if case.before.checks_without_gradient.get(name, 0) + 1 >= DEAD_CHECKS]
    # If no parameter has a gradient, reporting that gradients vanish is enough.
    if 0 < len(dead) < len(case.now.gradient_norms):
        yield f"no gradient for {DEAD_CHECKS} checks: {_list_names(dead)}", _name_figures(dead)


@_rule("Lower the learning rate; about 0.001 of the norm a step is usual.", "Clip gradients.")
def large_updates(case: Case) -> Found:
    """An update changes the weights far too much."""
    if case.now.update_ratio > LARGEST_UPDATE and case.now.rate > 0:
        yield _about_update(case.now, f"above {LARGEST_UPDATE}")


@_rule(
    "Raise the learning rate.",
    "Weights in bf16 or fp16 lose small updates in rounding: keep them in fp32 (`bf16-mixed`).",
)
def small_updates(case: Case) -> Found:
    """Updates leave the weights unchanged although the learning rate and gradients are non-zero."""
    has_gradients = case.now.largest_norm >= case.gradient_min_norm
    if case.now.update_ratio < SMALLEST_UPDATE and case.now.rate > 0 and has_gradients:
        yield _about_update(case.now, f"below {SMALLEST_UPDATE}")


@_rule(
    "Look at the batch of that step: a broken or very long sample is the usual cause.",
    "Clip gradients, or lower the learning rate.",
)
def loss_spike(case: Case) -> Found:
    """A loss far above those before, by median and median absolute deviation.

    For normally distributed values, 1.4826 times the median absolute deviation estimates the standard deviation
    (Rousseeuw and Croux 1993).
    """
    if len(case.before.losses) < LOSSES_FOR_SPREAD or not case.now.losses:
        return
    median = statistics.median(case.before.losses)
    deviation = 1.4826 * statistics.median(abs(loss - median) for loss in case.before.losses)
    limit = median + SPIKE_DEVIATIONS * max(deviation, SMALLEST_SPREAD * abs(median))
    step, loss = max(case.now.losses, key=lambda each: each[1] if each[1] > limit else -math.inf)
    if loss > limit:
        figures = {"spike_step": step, "loss": loss, "median": median, "limit": limit}
        yield f"the loss of step {step} is {loss:.4g}; the median before was {median:.4g}", figures


@_rule("Check the schedule: its number of steps, its warm-up, and that it is stepped once for each update.")
def zero_learning_rate(case: Case) -> Found:
    """Updates are made with a rate of 0."""
    if case.now.rate == 0:
        yield "the learning rate is 0: updates change nothing", {"learning_rate": 0.0}


@_rule(
    "Check the schedule: its number of steps, and that a resume restores its state.",
    "If it rises on purpose (warm restarts), ignore this.",
)
def rising_learning_rate(case: Case) -> Found:
    """The rate rises again after it has fallen."""
    rate, before = case.now.rate, case.before.rate
    if case.before.rate_has_fallen and before is not None and rate > before:
        figures = {"learning_rate": rate, "learning_rate_before": before}
        yield f"the learning rate rises after it had fallen: from {before:.4g} to {rate:.4g}", figures


@_rule(
    "Weaken the regularisation of the latent space (KL weight, free bits), or warm it up.",
    "Check that the decoder cannot do without the latent values.",
)
def latent_collapse(case: Case) -> Found:
    """Latent values no longer differ."""
    name, deviation = case.now.latent or ("", math.nan)
    if deviation < case.latent_std_min:
        figures = {"metric": name, "latent_std": deviation, "latent_std_min": case.latent_std_min}
        yield f"latent values have collapsed: the standard deviation that {name!r} reports is {deviation:.3g}", figures


@_rule(
    "Look at what else runs on that host, and at the clocks and temperature of its device.",
    "Look at the data of that rank: a slow disk, longer samples, fewer workers.",
)
def straggler(case: Case) -> Found:
    """At two checks in a row, one rank takes far longer than the others, so that they wait for it."""
    rank = _slow_rank(case.now)
    if rank is not None and rank == case.before.slow_rank:
        (host, seconds), others = case.now.ranks[rank], _median_of_others(case.now, rank)
        figures = {"rank": rank, "host": host, "step_seconds": seconds, "step_seconds_of_others": others}
        yield f"rank {rank} on {host} takes {1000 * seconds:.4g} ms a step, the others {1000 * others:.4g} ms", figures


@_rule(
    "Check the loader: one seed for all batches, an iterator that is made again, a data set of one batch.",
    "Check that the sampler divides the data among ranks (`DistributedSampler`, `dataset.shard` of a job).",
)
def repeated_data(case: Case) -> Found:
    """The same batch comes twice in a row, or to all ranks."""
    if len(case.now.batches) > 1 and () not in case.now.batches and len({each[-1] for each in case.now.batches}) == 1:
        yield "all ranks train on the same batch", {"on_all_ranks": True}
    elif any(len(each) == 2 and each[0] == each[1] for each in case.now.batches):
        yield "the same batch comes twice in a row", {"on_all_ranks": False}


def _largest(*values: float) -> float:
    """Return the largest number; nan if one of them is nan, or if there is none."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=math.nan)


def _first_broken_step(reading: Reading) -> int | None:
    return next((step for step, loss in reading.losses if math.isnan(loss)), None)


def _origin(reading: Reading) -> tuple[str, dict[str, Any]]:
    """Return the first module with nan, in words; nothing if an earlier step had nan, as then all modules give nan."""
    if reading.origin is None or reading.origin[0] > (_first_broken_step(reading) or reading.step):
        return "", {}
    step, in_backward, name = reading.origin
    what = (
        "gradient that is not finite comes out of the backward" if in_backward else "output that is not finite is that"
    )
    return f"; the first {what} of {name!r} in step {step}", {"origin": name, "origin_step": step}


def _about_update(reading: Reading, limit: str) -> tuple[str, dict[str, Any]]:
    text = f"an update changes the weights by {reading.update_ratio:.3g} of their norm, {limit}"
    return text, {"update_ratio": reading.update_ratio, "learning_rate": reading.rate}


def _slow_rank(reading: Reading) -> int | None:
    """Return the slowest rank if it is far slower than the others."""
    measured = [(seconds, rank) for rank, (_, seconds) in enumerate(reading.ranks) if not math.isnan(seconds)]
    if len(measured) < 2:
        return None
    slowest, rank = max(measured)
    others = _median_of_others(reading, rank)
    return rank if slowest >= STRAGGLER_FACTOR * others and slowest - others >= STRAGGLES_BY_S else None


def _median_of_others(reading: Reading, rank: int) -> float:
    others = (seconds for other, (_, seconds) in enumerate(reading.ranks) if other != rank)
    return statistics.median(seconds for seconds in others if not math.isnan(seconds))


def _name_figures(names: Sequence[str]) -> dict[str, Any]:
    return {"parameters": list(names[:MOST_NAMES]), "count": len(names)}


def _list_names(names: Sequence[str]) -> str:
    return list_first(list(map(repr, names)), MOST_NAMES)
