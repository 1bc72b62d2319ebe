"""What is wrong with one update, by the rules of `Diagnosis`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, get_args

from ..diagnosis.readings import Fault, History, Limits, Reading
from ..diagnosis.rules import exploding_gradients, find_faults, loss_spike, nonfinite_gradients, nonfinite_loss

__all__ = ["FAULTS", "FaultKind", "UpdateFigures", "faults_of_update", "note_good_step"]

FaultKind = Literal["nonfinite", "loss_spike", "exploding_gradients"]
FAULTS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)

_RULES: Final = {
    "nonfinite": (nonfinite_loss, nonfinite_gradients),
    "loss_spike": (loss_spike,),
    "exploding_gradients": (exploding_gradients,),
}
_ALL = "all parameters"
"""How a figure names the gradient of everything that an optimizer updates."""


@dataclass(frozen=True)
class UpdateFigures:
    """An update before it is made, over all ranks."""

    loss: float | None = None
    """The largest loss of the backward calls of this step so far, ``nan`` where one is not finite; None without one."""
    gradient_norm: float | None = None
    """L2 norm of all gradients, ``nan`` where one is not finite; None where nobody asks."""


def faults_of_update(
    figures: UpdateFigures, step: int, history: History, limits: Limits, kinds: Collection[str]
) -> list[Fault]:
    """The faults of `kinds` that an update of `step` would have."""
    reading = Reading(
        step=step,
        losses=() if figures.loss is None else ((step, figures.loss),),
        gradient_norms={} if figures.gradient_norm is None else {_ALL: figures.gradient_norm},
    )
    rules = [rule for kind in FAULTS if kind in kinds for rule in _RULES[kind]]
    return list(find_faults(reading, history, limits, rules=rules))


def note_good_step(history: History, loss: float | None, gradient_norm: float | None) -> None:
    """Have later steps be judged by this one, too."""
    if loss is not None and math.isfinite(loss):
        history.losses.append(loss)
    if gradient_norm is not None and math.isfinite(gradient_norm):
        history.largest_norms.append(gradient_norm)
