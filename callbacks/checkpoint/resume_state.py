"""What a resumed run takes over from its checkpoint beside weights and optimizers, and when."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl

from ..hook.events import run_state_of
from .rank_state import (
    SHARDED_GRADIENTS,
    capture_rng_of_ranks,
    gather_gradients,
    gradients_of,
    gradients_of_rank,
    loader_generators,
    restore_gradients,
    restore_rng_of_rank,
    sharded_gradients_of,
    warn_of_loaders_without_position,
    warn_of_lost_rng,
)
from .selection import find_checkpoint

__all__ = ["ResumeState", "capture_parts", "stands_between_batches"]


def stands_between_batches(trainer: pl.Trainer) -> bool:
    """Whether no batch is being trained and the epoch is not over; before the first batch that is true as well."""
    # Lightning declares the counters as a base class with fewer fields.
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    # An epoch also ends, for Lightning, where ``max_steps`` ends the run within it; a longer run goes on with that.
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_epoch_over = is_last and epochs.processed == epochs.started
    return bool(batches.ready == batches.processed and not is_epoch_over)


def capture_parts(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    parts: dict[str, Any],
    *,
    is_between_batches: bool,
    save_gradients: bool | None,
) -> None:
    """Add what `ResumeState` takes over to `parts` of a checkpoint. Collective.

    Args:
        trainer: The trainer that saves.
        pl_module: The module that it trains.
        parts: The checkpoint's own part of genlight.
        is_between_batches: Whether a batch was trained to its end and the next one of its epoch not begun.
        save_gradients: Whether gradients are stored; None means where an open accumulation window needs them.
    """
    parts["is_between_batches"] = is_between_batches
    parts["is_last_batch"] = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    if "rng" not in parts:
        parts["rng"] = capture_rng_of_ranks(loader_generators(trainer))
    if save_gradients is None:
        save_gradients = _needs_gradients(trainer, pl_module, is_between_batches)
    gradients = gradients_of(pl_module) if save_gradients else {}
    if trainer.strategy.reduce_boolean_decision(bool(gradients), all=False):
        parts["gradients"] = gather_gradients(gradients)
    sharded = sharded_gradients_of(pl_module) if save_gradients else {}
    if sharded:
        parts[SHARDED_GRADIENTS] = sharded


def _needs_gradients(trainer: pl.Trainer, pl_module: pl.LightningModule, is_between_batches: bool) -> bool:
    if not pl_module.automatic_optimization:
        return True  # Only the module knows its windows; one that clears its gradients has none to store.
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_open = progress.current.ready % trainer.accumulate_grad_batches != 0 and not progress.is_last_batch
    return is_open and is_between_batches


class ResumeState:
    """What was loaded of a checkpoint and is put back later, at the points from which a run draws on it."""

    def __init__(self) -> None:
        self._gradients: dict[str, Any] = {}
        self._rng: list[Any] | None = None
        self.is_within_epoch = False
        """Whether the run goes on between two batches of an epoch."""
        self._elapsed_before_s = 0.0
        self._started_at_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, over all attempts."""
        here = 0.0 if self._started_at_s is None else time.monotonic() - self._started_at_s
        return self._elapsed_before_s + here

    def load(self, trainer: pl.Trainer, parts: dict[str, Any]) -> None:
        """Take what `capture_parts` added; random states are put back at once, and once more by `restore_rng`."""
        self._elapsed_before_s = parts.get("elapsed_s", 0.0)
        gradients = gradients_of_rank(parts.get("gradients", []), trainer.global_rank, trainer.world_size)
        self._gradients = gradients | parts.get(SHARDED_GRADIENTS, {})
        self.is_within_epoch = bool(parts.get("is_between_batches")) and not parts.get("is_last_batch")
        if "rng" in parts:
            # Now, for what draws before the first batch; where batches went before, once more at the next one,
            # because making the loader's iterator anew draws what the interrupted epoch had drawn already.
            lost = restore_rng_of_rank(parts["rng"], trainer.global_rank)
            warn_of_lost_rng(lost, len(parts["rng"]), trainer.global_rank, trainer.world_size)
            if parts.get("is_between_batches"):
                self._rng = parts["rng"]

    @property
    def restores_rng_at_first_batch(self) -> bool:
        """Whether random states are put back at the first batch.

        After the last batch Lightning's loop goes on with an epoch whose iterator draws as it would have.
        """
        return self._rng is not None and self.is_within_epoch

    def begin_training(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put gradients back, and say on rank zero which loaders begin with their first batch again."""
        self._started_at_s = time.monotonic()
        if trainer.ckpt_path is not None:  # the run state of a checkpoint names the one before it
            run_state_of(trainer).latest_checkpoint_uri = _uri_of(trainer.ckpt_path)
        gradients, self._gradients = self._gradients, {}
        restore_gradients(pl_module, gradients)
        if self.is_within_epoch and trainer.is_global_zero:
            warn_of_loaders_without_position(trainer)
        self.is_within_epoch = False

    def restore_rng(self, trainer: pl.Trainer) -> None:
        """Put random states back; once, at the point from which a run draws as it did before."""
        states, self._rng = self._rng, None
        if states is not None:
            restore_rng_of_rank(states, trainer.global_rank, loader_generators(trainer))


def _uri_of(ckpt_path: str | os.PathLike[str]) -> str:
    """The record that `ckpt_path` means, else itself."""
    try:
        return str(find_checkpoint(ckpt_path))
    except FileNotFoundError:  # a URL
        return os.fspath(ckpt_path)
