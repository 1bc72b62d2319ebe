"""One check: what this rank has seen as one vector, which one reduction makes that of all ranks and one look reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .module_trace import ModuleTrace
from .readings import Reading
from .step_clock import StepClock
from .update_watch import UpdateWatch

__all__ = ["LATENT_METRICS", "Check", "RankView", "loss_of"]

LATENT_METRICS = {"latent_std": 1.0, "z_std": 1.0, "latent_var": 0.5, "z_var": 0.5}
"""Metrics for the spread of latent values, the first that is there counts, with the power that makes a deviation of
it."""
_NOTHING = -math.inf
"""What a rank without a value says: the largest of all ranks counts."""


@dataclass
class RankView:
    """What this rank has seen since the last check."""

    since: int
    """The step of the last check."""
    step: int
    """The step of this one."""
    losses: list[tuple[int, torch.Tensor | float]]
    """With their steps."""
    origins: list[tuple[int, torch.Tensor]]
    """What `ModuleTrace.origins` gave, with its step."""
    fingerprints: list[torch.Tensor | None]
    """Of the last two batches."""
    latent: tuple[str, Any] | None


class Check:
    """The parts of a check that stay the same from one to the next, so that its vector has one length on all ranks.

    Args:
        watch: Looks at updates.
        clock: Measures this rank.
        trace: Knows the names of modules.
        has_names: Whether gradients are told by parameter, which needs the same parameters on all ranks.
        most_losses: How many losses are sent, the last ones.
        rank: Of this process.
        hosts: Of all ranks.
        device: Where the vector is.
        shares_data: Whether ranks may get equal batches on purpose.
    """

    def __init__(
        self,
        watch: UpdateWatch,
        clock: StepClock,
        trace: ModuleTrace,
        *,
        has_names: bool,
        most_losses: int,
        rank: int,
        hosts: Sequence[str],
        device: torch.device,
        shares_data: bool,
    ) -> None:
        self._watch, self._clock, self._trace = watch, clock, trace
        self._names = watch.names if has_names else []
        self._most_losses = most_losses
        self._rank, self._hosts, self._device = rank, hosts, device
        self._shares_data = shares_data
        self._places = len(trace.names) + 2

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the parts of the vector, as `vector` puts them together."""
        ranks = len(self._hosts)
        return (len(self._names), 3, self._most_losses, self._most_losses, 1, 2, 1, ranks, ranks)

    def unknown(self) -> torch.Tensor:
        """The vector of a rank that knows nothing."""
        return torch.full((sum(self.lengths),), _NOTHING, dtype=torch.float64, device=self._device)

    def vector(self, view: RankView) -> torch.Tensor:
        """What this rank has seen; the largest of all ranks' values is that of all."""
        summary = self._watch.summary(self._device)
        losses = self._losses(view.losses[-self._most_losses :] if self._most_losses else [])
        is_bad = ~torch.isfinite(losses) & (losses != _NOTHING)
        before, now = view.fingerprints if len(view.fingerprints) == 2 else (None, None)
        repeats = torch.zeros(1, dtype=torch.float64, device=self._device)
        if before is not None and now is not None:
            repeats += before == now
        parts = (
            summary[: len(self._names)],
            summary[-3:],
            torch.where(is_bad, _NOTHING, losses),
            is_bad.double(),
            self._latent(view.latent),
            self._origins(view),
            repeats,
            self._slot(self._clock.seconds()),
            self._slot(now),
        )
        return torch.cat(parts)

    def reading(self, reduced: torch.Tensor, view: RankView) -> Reading:
        """The numbers of all ranks; waits for the device, once."""
        values = iter(reduced.tolist())
        parts = [[next(values) for _ in range(length)] for length in self.lengths]
        norms, (ratio, weights_bad, rate), losses, are_bad, (latent,), origins, (repeats,), seconds, prints = parts
        steps = [number for number, _ in view.losses[-self._most_losses :]]
        forward, backward = (self._origin(value, view.since) for value in origins)
        if forward is not None and backward is not None:  # what is wrong forward is wrong backward in the same step
            forward, backward = (forward, None) if forward[0] <= backward[0] else (None, backward)
        origin = forward or backward
        has_update = max(norms, default=rate) >= 0
        return Reading(
            step=view.step,
            gradient_norms={
                name: norm if math.isfinite(norm) else math.nan for name, norm in zip(self._names, norms, strict=True)
            }
            if has_update
            else {},
            update_ratio=ratio if ratio >= 0 else None,
            weights_are_finite=weights_bad <= 0,
            losses=[
                (number, math.nan if bad > 0 else loss)
                for number, loss, bad in zip(steps, losses, are_bad, strict=False)
                if bad > 0 or loss > _NOTHING
            ],
            highest_rate=rate if rate >= 0 else None,
            latent=None if view.latent is None or latent == _NOTHING else (view.latent[0], -latent),
            step_seconds=[None if each == _NOTHING else each for each in seconds],
            hosts=self._hosts,
            repeats_batch=repeats > 0,
            ranks_share_batch=len(prints) > 1
            and not self._shares_data
            and prints[0] != _NOTHING
            and len(set(prints)) == 1,
            forward_origin=None if forward is None else forward[1],
            backward_origin=None if backward is None else backward[1],
            origin_step=None if origin is None else origin[0],
        )

    def _losses(self, losses: list[tuple[int, torch.Tensor | float]]) -> torch.Tensor:
        padded = torch.full((self._most_losses,), _NOTHING, dtype=torch.float64, device=self._device)
        values = [value for _, value in losses]
        if values and all(isinstance(value, torch.Tensor) for value in values):
            padded[: len(values)] = torch.stack([torch.as_tensor(value) for value in values]).to(padded)
        else:
            for index, value in enumerate(values):
                padded[index] = torch.as_tensor(value)
        return padded

    def _latent(self, latent: tuple[str, Any] | None) -> torch.Tensor:
        """The negative deviation: the smallest of all ranks' counts."""
        if latent is None:
            return torch.full((1,), _NOTHING, dtype=torch.float64, device=self._device)
        name, value = latent
        number = torch.as_tensor(value).detach().reshape(-1)[:1].to(self._device, torch.float64)
        return -torch.nan_to_num(number.clamp_min(0) ** LATENT_METRICS[name.rpartition("/")[2]], nan=math.inf)

    def _origins(self, view: RankView) -> torch.Tensor:
        """The first step and module of each direction as one negative number: the first of all ranks' counts."""
        if not view.origins:
            return torch.full((2,), _NOTHING, dtype=torch.float64, device=self._device)
        after = torch.tensor([[step - view.since] for step, _ in view.origins], dtype=torch.float64)
        indices = torch.stack([each for _, each in view.origins])
        return -(after.to(self._device) * self._places + indices + 1).amin(dim=0)

    def _origin(self, value: float, since: int) -> tuple[int, str] | None:
        if value == _NOTHING:
            return None
        after, index = divmod(int(-value), self._places)
        return since + after, self._trace.name_of(index - 1)

    def _slot(self, value: torch.Tensor | float | None) -> torch.Tensor:
        """One place for each rank, of which this rank fills its own."""
        slots = torch.full((len(self._hosts),), _NOTHING, dtype=torch.float64, device=self._device)
        if value is not None:
            slots[self._rank] = torch.nan_to_num(torch.as_tensor(value).to(slots), nan=_NOTHING, posinf=_NOTHING)
        return slots


def loss_of(outputs: Any) -> Any:
    """The loss among what a step gave: its ``loss``, else what has that word in its name; None where there is none."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if not isinstance(outputs, Mapping):
        return None
    for name in ("loss", "train/loss", "train_loss"):
        if name in outputs:
            return outputs[name]
    return next((value for name, value in outputs.items() if isinstance(name, str) and "loss" in name.lower()), None)
