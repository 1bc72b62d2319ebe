"""The rules: from what a check has read to the faults that there are. Each is a function of plain numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .faults import FAULT_KINDS, Fault, History, Limits, Reading

__all__ = ["faults_of_update", "find_faults", "reading_of_update"]

MOST_NAMES = 5
NORMS_FOR_MEDIAN = 5
EXPLODES_BY = 100.0
"""How many times the usual largest norm is one that explodes."""
SMALLEST_EXPLOSION = 1.0
"""Below this norm a gradient does not explode, however small it was before: a run that has converged, say."""
LARGEST_NORM = 1e4
"""Above this it explodes in any case."""
DEAD_CHECKS = 3
"""For how many checks in a row a parameter without a gradient is dead."""
SMALLEST_UPDATE, LARGEST_UPDATE = 1e-8, 0.3
"""Shares of the weights' norm: an update below the one changes nothing, one above the other too much."""
SPIKE_DEVIATIONS = 8.0
"""How many standard deviations above the median a loss is a spike."""
SMALLEST_SPREAD = 0.01
"""Share of the median loss that counts as its spread at least, where losses hardly vary."""
STRAGGLER_FACTOR = 2.0
"""A rank that takes this many times longer than the others is reported."""
STRAGGLES_BY_S = 0.002
"""Below this difference a rank is not worth naming."""


@dataclass(frozen=True)
class Case:
    """The figures that a rule judges by."""

    reading: Reading
    history: History
    limits: Limits


Rule = Callable[[Case], Fault | None]


def find_faults(
    reading: Reading, history: History, limits: Limits, *, rules: Sequence[Rule] | None = None
) -> Iterator[Fault]:
    """The faults of this check, by all rules in their order, or by those of `rules`."""
    case = Case(reading, history, limits)
    for rule in RULES if rules is None else rules:
        fault = rule(case)
        if fault is not None:
            yield replace(fault, step=reading.step)


def nonfinite_loss(case: Case) -> Fault | None:
    """A loss that is nan or infinite, in any step since the last check."""
    step = next((step for step, loss in case.reading.losses if math.isnan(loss)), None)
    if step is None:
        return None
    return Fault(
        "nonfinite_loss",
        f"the loss is not finite since step {step}{_origin(case.reading)}",
        (
            "Lower the learning rate, or warm it up for longer.",
            "Look for a division by zero, a logarithm or a root of a value <= 0, or an overflow of fp16.",
            *_how_to_find_origin(case.reading),
        ),
        {"first_step": step, **_origin_figures(case.reading)},
    )


def nonfinite_gradients(case: Case) -> Fault | None:
    """A gradient that is nan or infinite when its update is made."""
    bad = [name for name, norm in case.reading.gradient_norms.items() if not math.isfinite(norm)]
    if not bad:
        return None
    return Fault(
        "nonfinite_gradients",
        f"gradients are not finite: {_listed(bad)}{_origin(case.reading)}",
        (
            "Leave such an update out: `if torch.isfinite(loss): optimizer.step()`.",
            "Clip gradients, and lower the learning rate.",
            *_how_to_find_origin(case.reading),
        ),
        {"parameters": bad[:MOST_NAMES], "count": len(bad), **_origin_figures(case.reading)},
    )


def vanishing_gradients(case: Case) -> Fault | None:
    """Even the largest gradient is next to nothing."""
    largest = _largest_norm(case.reading)
    if largest is None or largest >= case.limits.gradient_min_norm:
        return None
    return Fault(
        "vanishing_gradients",
        f"the largest gradient has a norm of {largest:.3g}, below {case.limits.gradient_min_norm:.3g}",
        (
            "Check that the loss depends on the parameters: no `detach()`, `no_grad()` or constant in between.",
            "Look for saturated activations; normalise layers, or initialise them differently.",
        ),
        {"largest_norm": largest, "gradient_min_norm": case.limits.gradient_min_norm},
    )


def exploding_gradients(case: Case) -> Fault | None:
    """A gradient is very large, or far larger than gradients of this run were."""
    largest = _largest_norm(case.reading)
    if largest is None:
        return None
    usual = (
        statistics.median(case.history.largest_norms) if len(case.history.largest_norms) >= NORMS_FOR_MEDIAN else None
    )
    limit = LARGEST_NORM
    if usual:
        limit = min(limit, max(usual * EXPLODES_BY, SMALLEST_EXPLOSION))
    if largest <= limit:
        return None
    name = max(case.reading.gradient_norms, key=lambda name: _or_zero(case.reading.gradient_norms[name]))
    before = "" if usual is None else f"; the largest was {usual:.3g} before"
    return Fault(
        "exploding_gradients",
        f"the gradient of {name!r} has a norm of {largest:.3g}{before}",
        ("Clip gradients (`torch.nn.utils.clip_grad_norm_`).", "Lower the learning rate, or warm it up for longer."),
        {"parameter": name, "largest_norm": largest, "usual_largest_norm": usual, "limit": limit},
    )


def dead_parameters(case: Case) -> Fault | None:
    """Parameters that an optimizer holds get no gradient for several checks."""
    dead = [
        name
        for name, norm in case.reading.gradient_norms.items()
        if not norm and case.history.checks_without_gradient.get(name, 0) + 1 >= DEAD_CHECKS
    ]
    # Where nothing has a gradient, that it vanishes says it all.
    if not dead or len(dead) == len(case.reading.gradient_norms):
        return None
    return Fault(
        "dead_parameters",
        f"no gradient for {DEAD_CHECKS} checks: {_listed(dead)}",
        (
            "Check that the forward uses them, and that nothing detaches them from the loss.",
            "Of a ReLU that never fires: lower the learning rate, or use LeakyReLU or GELU.",
            "Parameters that are not to be trained: `requires_grad_(False)`.",
        ),
        {"parameters": dead[:MOST_NAMES], "count": len(dead)},
    )


def update_size(case: Case) -> Fault | None:
    """An update changes the weights by far too much, or by nothing."""
    ratio = case.reading.update_ratio
    if ratio is None or not math.isfinite(ratio) or not case.reading.highest_rate:
        return None
    figures = {"update_ratio": ratio, "learning_rate": case.reading.highest_rate}
    if ratio > LARGEST_UPDATE:
        return Fault(
            "large_updates",
            f"an update changes the weights by {ratio:.3g} of their norm, above {LARGEST_UPDATE:.3g}",
            ("Lower the learning rate; about 0.001 of the norm a step is usual.", "Clip gradients."),
            figures,
        )
    largest = _largest_norm(case.reading)
    if ratio < SMALLEST_UPDATE and largest is not None and largest >= case.limits.gradient_min_norm:
        return Fault(
            "small_updates",
            f"an update changes the weights by {ratio:.3g} of their norm, below {SMALLEST_UPDATE:.3g}",
            (
                "Raise the learning rate.",
                "Weights in bf16 or fp16 lose small updates in rounding: keep them in fp32 (`bf16-mixed`).",
            ),
            figures,
        )
    return None


def loss_spike(case: Case) -> Fault | None:
    """A loss far above those before, by median and median absolute deviation."""
    spread = case.history.spread()
    if spread is None:
        return None
    median, deviation = spread
    limit = median + SPIKE_DEVIATIONS * max(deviation, SMALLEST_SPREAD * abs(median))
    spikes = [(step, loss) for step, loss in case.reading.losses if loss > limit]
    if not spikes:
        return None
    step, loss = max(spikes, key=lambda spike: spike[1])
    return Fault(
        "loss_spike",
        f"the loss of step {step} is {loss:.4g}; the median before was {median:.4g}",
        (
            "Look at the batch of that step: a broken or very long sample is the usual cause.",
            "Clip gradients, or lower the learning rate.",
        ),
        {"spike_step": step, "loss": loss, "median": median, "deviation": deviation, "limit": limit},
    )


def zero_learning_rate(case: Case) -> Fault | None:
    """Updates are made with a rate of 0."""
    if case.reading.highest_rate is None or case.reading.highest_rate > 0:
        return None
    return Fault(
        "zero_learning_rate",
        "the learning rate is 0: updates change nothing",
        ("Check the schedule: its number of steps, its warm-up, and that it is stepped once for each update.",),
        {"learning_rate": case.reading.highest_rate},
    )


def rising_learning_rate(case: Case) -> Fault | None:
    """The rate rises again after it has fallen."""
    rate, before = case.reading.highest_rate, case.history.rate
    if rate is None or before is None or rate <= before or not case.history.rate_has_fallen:
        return None
    return Fault(
        "rising_learning_rate",
        f"the learning rate rises after it had fallen: from {before:.4g} to {rate:.4g}",
        (
            "Check the schedule: its number of steps, and that a resume restores its state.",
            "Where it rises on purpose (warm restarts), this can be left as it is.",
        ),
        {"learning_rate": rate, "learning_rate_before": before},
    )


def latent_collapse(case: Case) -> Fault | None:
    """Latent values no longer differ."""
    if case.reading.latent is None or not case.reading.latent[1] < case.limits.latent_std_min:
        return None
    name, deviation = case.reading.latent
    return Fault(
        "latent_collapse",
        f"latent values have collapsed: the standard deviation that {name!r} reports is {deviation:.3g}",
        (
            "Weaken the regularisation of the latent space (KL weight, free bits), or warm it up.",
            "Check that the decoder cannot do without the latent values.",
        ),
        {"metric": name, "latent_std": deviation, "latent_std_min": case.limits.latent_std_min},
    )


def straggler(case: Case) -> Fault | None:
    """One rank takes longer than the others, which wait for it, at two checks in a row."""
    slow = _slow_rank(case.reading.step_seconds)
    before = _slow_rank(case.history.step_seconds)
    if slow is None or before is None or slow[0] != before[0]:
        return None
    rank, slowest, others = slow
    host = case.reading.hosts[rank] if rank < len(case.reading.hosts) else "unknown"
    return Fault(
        "straggler",
        f"rank {rank} on {host} takes {slowest * 1000:.4g} ms a step, the others {others * 1000:.4g} ms",
        (
            f"Look at what else runs on {host}, and at the clocks and temperature of its device.",
            "Look at the data of that rank: a slow disk, longer samples, fewer workers.",
        ),
        {"rank": rank, "host": host, "step_seconds": slowest, "step_seconds_of_others": others},
    )


def repeated_data(case: Case) -> Fault | None:
    """The same batch comes twice in a row, or to all ranks."""
    if not case.reading.repeats_batch and not case.reading.ranks_share_batch:
        return None
    to_all = case.reading.ranks_share_batch
    return Fault(
        "repeated_data",
        "all ranks train on the same batch" if to_all else "the same batch comes twice in a row",
        (
            "Check that the sampler divides the data among ranks (`DistributedSampler`, `dataset.shard` of a job)."
            if to_all
            else "Check the loader: one seed for all batches, an iterator that is made again, a data set of one batch.",
        ),
        {"twice_in_a_row": case.reading.repeats_batch, "on_all_ranks": to_all},
    )


RULES: tuple[Rule, ...] = (
    nonfinite_loss,
    nonfinite_gradients,
    vanishing_gradients,
    exploding_gradients,
    dead_parameters,
    update_size,
    loss_spike,
    zero_learning_rate,
    rising_learning_rate,
    latent_collapse,
    straggler,
    repeated_data,
)


_RULES_OF_UPDATES = {
    "nonfinite": (nonfinite_loss, nonfinite_gradients),
    "loss_spike": (loss_spike,),
    "exploding_gradients": (exploding_gradients,),
}
_ALL = "all parameters"
"""How a figure names the gradient of everything that an optimizer updates."""


def reading_of_update(step: int, loss: float | None, gradient_norm: float | None) -> Reading:
    """The reading of an update before it is made; None is what nobody has measured."""
    return Reading(
        step=step,
        losses=() if loss is None else ((step, loss),),
        gradient_norms={} if gradient_norm is None else {_ALL: gradient_norm},
    )


def faults_of_update(reading: Reading, history: History, kinds: Collection[str]) -> list[Fault]:
    """The faults of `kinds` that an update with this reading would have."""
    rules = [rule for kind in FAULT_KINDS if kind in kinds for rule in _RULES_OF_UPDATES[kind]]
    return list(find_faults(reading, history, Limits(), rules=rules))


def _slow_rank(step_seconds: Sequence[float | None]) -> tuple[int, float, float] | None:
    """The slowest rank, its seconds and the median of the others, where it is far slower than they are."""
    measured = [(seconds, rank) for rank, seconds in enumerate(step_seconds) if seconds is not None]
    if len(measured) < 2:
        return None
    slowest, rank = max(measured)
    others = statistics.median(seconds for seconds, other in measured if other != rank)
    is_slow = slowest >= STRAGGLER_FACTOR * others and slowest - others >= STRAGGLES_BY_S
    return (rank, slowest, others) if is_slow else None


def _largest_norm(reading: Reading) -> float | None:
    """The largest gradient norm; None without an update, or where one is not finite."""
    norms = reading.gradient_norms.values()
    return max(norms) if norms and all(map(math.isfinite, norms)) else None


def _or_zero(norm: float) -> float:
    return norm if math.isfinite(norm) else 0.0


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(map(repr, listed[:MOST_NAMES])) + more


def _origin(reading: Reading) -> str:
    if reading.forward_origin is not None:
        said = f"; the first output that is not finite is that of {reading.forward_origin!r}"
    elif reading.backward_origin is not None:
        said = f"; the first gradient that is not finite comes out of the backward of {reading.backward_origin!r}"
    else:
        return ""
    weights = "" if reading.weights_are_finite else "; weights were not finite before that update"
    return f"{said} in step {reading.origin_step}{weights}"


def _origin_figures(reading: Reading) -> Mapping[str, object]:
    return {
        "forward_origin": reading.forward_origin,
        "backward_origin": reading.backward_origin,
        "origin_step": reading.origin_step,
        "weights_are_finite": reading.weights_are_finite,
    }


def _how_to_find_origin(reading: Reading) -> tuple[str, ...]:
    """Once the weights are nan every module gives nan: which one was the first can be seen in its own step alone."""
    if reading.weights_are_finite and (reading.forward_origin or reading.backward_origin):
        return ()
    return ("To learn which module was the first: run again from an earlier checkpoint with `trace_modules=True`.",)
