"""The events of callbacks beyond Lightning's own, and the run state that all callbacks of a trainer share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl

from ...adapter.contract.run_state import RunState

__all__ = [
    "HOOK_EVENTS",
    "Figures",
    "callbacks_of",
    "fire",
    "is_own_loop",
    "is_rank_zero",
    "note_rank",
    "publish_metrics",
    "publish_scores",
    "run_state_of",
    "share_run_state",
    "timed",
]

HOOK_EVENTS = (
    "on_new_training_run",
    "on_rollout_start",
    "on_rollout_end",
    "on_module_batch_end",
    "on_metrics",
    "on_scores",
    "on_figures",
    "on_mb_end",
    "on_train_phase_end",
    "on_epoch_end",
    "on_training_end",
    "on_training_failed",
    "on_checkpoint_timed",
    "on_checkpoint_durable",
    "on_samples_written",
    "on_roll_back_due",
    "on_roll_back",
    "on_fault",
    "on_time_spent",
)
"""Events that Lightning's callbacks do not have."""

Figures = Callable[[], Mapping[str, float]]
"""Gives figures by the names of their metrics; called when they are sent."""

_RUN_STATE_ATTRIBUTE = "_genlight_run_state"
_RANK_ZERO_ATTRIBUTE = "_genlight_is_rank_zero"


def run_state_of(trainer: pl.Trainer) -> RunState:
    """The run state that all hooks of `trainer` share; made at the first call."""
    state: RunState | None = getattr(trainer, _RUN_STATE_ATTRIBUTE, None)
    if state is None:
        state = RunState()
        share_run_state(trainer, state)
    return state


def share_run_state(trainer: pl.Trainer, state: RunState) -> None:
    """Have `run_state_of` return `state` for `trainer`."""
    setattr(trainer, _RUN_STATE_ATTRIBUTE, state)


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks of `trainer`; Lightning sets the attribute without declaring it."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def fire(trainer: pl.Trainer, event: str, *args: Any) -> None:
    """Deliver one of `HOOK_EVENTS` to every callback that has it."""
    for callback in callbacks_of(trainer):
        method = getattr(callback, event, None)
        if method is not None:
            method(trainer, trainer.lightning_module, *args)


def is_own_loop(trainer: pl.Trainer) -> bool:
    """Whether the loop of `trainer` is genlight's, which fires `HOOK_EVENTS`; only once a fit has begun."""
    return bool(getattr(trainer.fit_loop, "raises_stops", False))


def publish_metrics(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    """Tell every callback the metrics of `step` by ``on_metrics``, and keep them as ``loss_stats`` of the run state."""
    run_state_of(trainer).loss_stats = metrics
    fire(trainer, "on_metrics", metrics, step)


def publish_scores(trainer: pl.Trainer, scores: dict[str, float], step: int) -> None:
    """Tell every callback the scores of an evaluation after `step` by ``on_scores``, and keep them as ``eval_scores``.

    A hook that evaluates calls this in its ``on_train_batch_end`` and states ``writes = ("eval_scores",)``, so that
    `LogMetrics` runs after it and sends the scores to the loggers at the same step.
    """
    run_state_of(trainer).eval_scores = scores
    fire(trainer, "on_scores", scores, step)


@contextlib.contextmanager
def timed(trainer: pl.Trainer, what: str) -> Iterator[None]:
    """Tell every callback by ``on_time_spent`` how long the block held training up, under the name `what`."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        fire(trainer, "on_time_spent", what, time.monotonic() - began_s)


def note_rank(trainer: pl.Trainer) -> None:
    """Keep what ``trainer.is_global_zero`` says, three properties deep, once ranks are known."""
    setattr(trainer, _RANK_ZERO_ATTRIBUTE, trainer.is_global_zero)


def is_rank_zero(trainer: pl.Trainer) -> bool:
    """Whether this process is the first of all, as `note_rank` kept it."""
    noted: bool | None = getattr(trainer, _RANK_ZERO_ATTRIBUTE, None)
    return trainer.is_global_zero if noted is None else noted
