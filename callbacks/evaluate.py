"""Scores of a hosted trainer's own evaluation at a cadence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from ..adapter.contract.exceptions import ContractError
from .hook.cadence import Boundaries, StepCadence
from .hook.events import publish_scores, timed
from .hook.hook import Hook
from .hook.listeners import skippable

__all__ = ["Evaluate", "scores_of"]


class Evaluate(Hook):
    """Calls the trainer's ``evaluate(state, ctx)`` at a cadence and fires ``on_scores`` with what it returns.

    The last scores are ``eval_scores`` of the run state, too. `LogMetrics` reports them at the same step. Random
    numbers that the evaluation draws do not change those of training. On several ranks every rank evaluates, and the
    scores of rank 0 are reported.

    Args:
        every_n_steps: Cadence in steps; 0 turns it off.
        critical: Whether a failing evaluation ends the run.

    Raises:
        ValueError: `every_n_steps` is negative.
        ContractError: At setup: the trainer has no ``evaluate``.
    """

    ranks: Literal["zero", "all"] = "all"
    writes = ("eval_scores",)
    every_n_steps = StepCadence()
    _not_events = Hook._not_events | {"on_fit_start"}
    # A trainer that cannot be evaluated at all is refused, also where a failing evaluation would be forgiven.

    def __init__(self, every_n_steps: int, *, critical: bool = False) -> None:
        self.every_n_steps = every_n_steps
        self.critical = critical
        self._boundaries = Boundaries(self)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _evaluation_of(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._boundaries = Boundaries(self, trainer.global_step)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._boundaries.crosses(trainer.global_step):
            with timed(trainer, "evaluation"):
                scores = scores_of(pl_module)
            publish_scores(trainer, scores, trainer.global_step)


def scores_of(pl_module: pl.LightningModule) -> dict[str, float]:
    """What the hosted trainer's ``evaluate`` returns now, by name; leaves the random numbers as they are.

    Raises:
        ContractError: There is no ``evaluate``, or it returned no mapping of numbers.
    """
    with isolate_rng():
        scores = _evaluation_of(pl_module)(getattr(pl_module, "contract_state", None), getattr(pl_module, "ctx", None))
    if not isinstance(scores, Mapping):
        raise ContractError(f"evaluate returned a {type(scores).__qualname__}; it must be a mapping of scores")
    return {str(name): _number(name, score) for name, score in scores.items()}


def _number(name: object, score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(score).__qualname__
        raise ContractError(f"evaluate returned a {kind} as {name!r}; a score is one number ({error})") from error


def _evaluation_of(pl_module: pl.LightningModule) -> Callable[..., Any]:
    plugin = getattr(pl_module, "plugin", None)
    evaluate = getattr(plugin, "evaluate", None)
    if not callable(evaluate):
        raise ContractError(
            f"{type(plugin or pl_module).__name__} has no evaluate(state, ctx); leave `validate` out of the job"
        )
    return evaluate  # type: ignore[no-any-return]
