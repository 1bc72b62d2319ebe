"""Call a hosted trainer's evaluation at a cadence, with the same scores and failures on all ranks.

`keep_modes` protects the training from hooks of a class that change modes, such as an evaluation or a sample.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from ...adapter.contract.exceptions import ContractError, EvaluationError
from ...adapter.plumbing.devices import gather_results, isolated_random_numbers
from ..hook.cadence import Boundaries, step_cadence
from ..hook.events import publish_scores, timed
from ..hook.hook import Hook, skippable

log = logging.getLogger(__name__)

_reported: weakref.WeakKeyDictionary[pl.LightningModule, set[str]] = weakref.WeakKeyDictionary()
"""Hooks for which `keep_modes` has warned, by module."""


class Evaluate(Hook):
    """Calls the trainer's ``evaluate(state, ctx)`` at a cadence and fires ``on_scores`` with the result.

    The latest scores are also ``eval_scores`` of the run state, and `LogMetrics` reports them at the same step. Random
    numbers drawn by the evaluation do not affect training. Every rank evaluates, and all report the same scores: rank
    0's, or the mean. If the evaluation fails on one rank, it counts as failed on all.

    Args:
        every_n_steps: Cadence in steps; 0 turns it off.
        critical: Whether a failing evaluation ends the run.
        average: Whether scores are averaged over the ranks; otherwise rank 0's scores count.

    Raises:
        ValueError: `every_n_steps` is negative.
        ContractError: At setup: the trainer has no ``evaluate``.
        EvaluationError: The evaluation failed on another rank, or its scores cannot be averaged.
    """

    ranks: Literal["zero", "all"] = "all"
    writes = ("eval_scores",)
    _not_events = Hook._not_events | {"on_fit_start"}
    # Refuse a trainer without `evaluate`, even if `critical` is false.

    def __init__(self, every_n_steps: int, *, critical: bool = False, average: bool = False) -> None:
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps)
        self.critical = critical
        self.average = average

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
        if not self._boundaries.crosses(trainer.global_step):
            return
        with timed(trainer, "evaluation"):
            scores = _scores_of_all_ranks(trainer, pl_module, average=self.average)
        publish_scores(trainer, scores, trainer.global_step)


def scores_of(pl_module: pl.LightningModule) -> dict[str, float]:
    """Call the hosted trainer's ``evaluate`` and return its scores by name.

    Afterwards random states and the modes of modules are as before.

    Raises:
        ContractError: There is no ``evaluate``, or it returned no mapping of numbers.
    """
    evaluate = _evaluation_of(pl_module)
    with keep_modes(pl_module, "evaluate"), isolated_random_numbers():
        scores = evaluate(getattr(pl_module, "contract_state", None), getattr(pl_module, "ctx", None))
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
    """Return the ``evaluate`` of the hosted trainer class; raises a `ContractError` if there is none."""
    plugin = getattr(pl_module, "plugin", None)
    evaluate = getattr(plugin, "evaluate", None)
    if not callable(evaluate):
        raise ContractError(
            f"{type(plugin or pl_module).__name__} has no evaluate(state, ctx); remove `validate` from the job"
        )
    return evaluate  # type: ignore[no-any-return]


def _scores_of_all_ranks(trainer: pl.Trainer, pl_module: pl.LightningModule, *, average: bool) -> dict[str, float]:
    """Evaluate on all ranks and return the same scores on each: the mean over ranks, or rank zero's. Collective.

    Raises:
        EvaluationError: It failed on another rank, or scores to average have different names on different ranks.
        Exception: The evaluation raised it on this rank. It is re-raised after all ranks know of it.
    """
    if trainer.world_size == 1:
        return scores_of(pl_module)
    scores: list[dict[str, float]] = []
    for rank, (theirs, problem) in enumerate(gather_results(lambda: scores_of(pl_module))):
        if theirs is None:
            raise EvaluationError(f"the evaluation failed on rank {rank}: {problem}")
        scores.append(theirs)
    first = scores[0]
    if not average:
        return first
    for rank, theirs in enumerate(scores):
        if set(theirs) != set(first):
            raise EvaluationError(
                f"scores cannot be averaged: rank 0 has {sorted(first)}, and rank {rank} has {sorted(theirs)}"
            )
    return {name: sum(theirs[name] for theirs in scores) / len(scores) for name in first}


@contextlib.contextmanager
def keep_modes(pl_module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Restore the training modes of modules that the block changes, with one warning that names them.

    If an evaluation left the model in eval mode, all later steps would train without dropout.

    Args:
        pl_module: The module whose submodules keep their modes.
        hook: The hook of the trainer class that the block calls.
    """
    modes = [(name, part, part.training) for name, part in pl_module.named_modules()]
    try:
        yield
    finally:
        changed = [name for name, part, was_training in modes if part.training != was_training]
        for _, part, was_training in modes:
            part.training = was_training
    named = _reported.setdefault(pl_module, set())
    if changed and hook not in named and pl_module.global_rank == 0:
        named.add(hook)
        log.warning(
            "`%s` changed the mode of %d modules, the first of them %s; genlight has restored it, because training "
            "would continue without dropout, for example. Call `train()` on them at the end of the hook.",
            *(hook, len(changed), changed[0]),
        )
