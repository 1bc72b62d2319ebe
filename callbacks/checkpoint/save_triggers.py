"""Saves that no cadence of steps asks for: after so many minutes, and when the monitored value is the best so far."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl

from ..hook.cadence import suppressed
from ..hook.events import run_state_of
from ..hook.hook import Hook

__all__ = ["SaveTriggers"]

AGREE_EVERY = 10
"""How many steps apart several ranks agree on whether the monitored value has improved."""
LOOK_EVERY_S = 1.0
"""How far apart the clock is looked at, at the pace of the last steps."""
FURTHEST_LOOK = 10_000
"""Steps after which it is looked at again, however fast they are."""


class SaveTriggers:
    """Whether a save is due by the clock or by the monitored value. Rank zero decides, and tells the others.

    The clock is looked at about once a second, and more often only shortly before a save. All ranks look in the same
    steps.

    Args:
        every_minutes: Minutes after the last save; 0 never asks for one.
        monitor: Metric or score whose improvement asks for a save; None never does.
        mode: Whether a smaller or a larger value is better.
    """

    def __init__(self, every_minutes: float, monitor: str | None, mode: Literal["min", "max"]) -> None:
        self._every_s = 60 * every_minutes
        self._monitor, self._mode = monitor, mode
        self._fact = f"best {monitor} that was saved"
        self._next_look = 0
        self._looked = (0, 0.0)
        self._saved_s = 0.0
        self._seen: tuple[Any, Any] = (None, None)

    def __bool__(self) -> bool:
        """Whether it ever asks for a save."""
        return bool(self._every_s) or self._monitor is not None

    def begin(self, step: int) -> None:
        """Training begins after `step`; minutes count from here."""
        self._saved_s = time.monotonic()
        self._looked = (step, self._saved_s)
        self._seen = (None, None)
        self._next_look = step + 1

    def rewind(self, step: int) -> None:
        """The run was put back to `step`."""
        self._looked, self._next_look = (step, time.monotonic()), step + 1

    def note_save(self) -> None:
        """A save of whatever reason begins."""
        self._saved_s = time.monotonic()

    def look(self, hook: Hook, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether `hook` has to save after this step, the same on all ranks; it is called again at the next look."""
        step, is_due = trainer.global_step, False
        if step >= self._next_look and not suppressed(pl_module):
            answer = (self._is_due(trainer), step + self._steps_to_next_look(trainer, step))
            is_due, self._next_look = trainer.strategy.broadcast(answer) if trainer.world_size > 1 else answer
        hook.next_due_step = min(hook.next_due_step, self._next_look)
        return is_due

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if not trainer.is_global_zero:
            return False
        is_better = self._monitor is not None and self._improved(trainer, self._monitor)
        return is_better or 0 < self._every_s <= time.monotonic() - self._saved_s

    def _steps_to_next_look(self, trainer: pl.Trainer, step: int) -> int:
        steps = FURTHEST_LOOK
        if self._every_s:
            now = time.monotonic()
            before, then = self._looked
            step_s = max(now - then, 1e-9) / max(step - before, 1)
            self._looked = (step, now)
            left_s = self._saved_s + self._every_s - now
            left_s = left_s if left_s > 0 else self._every_s  # it is saved now
            steps = int(max(1, min(steps, min(left_s / 2, LOOK_EVERY_S) / step_s)))
        if self._monitor is not None:
            steps = min(steps, 1 if trainer.world_size == 1 else AGREE_EVERY)
        return steps

    def _improved(self, trainer: pl.Trainer, monitor: str) -> bool:
        """Whether the newest value is better than all before it; a value that is not finite is not."""
        state = run_state_of(trainer)
        scores, metrics = state.eval_scores, state.loss_stats
        if hasattr(trainer.lightning_module, "step_result"):
            if scores is self._seen[0] and metrics is self._seen[1]:
                return False  # nothing was reported since the last look
            sources: tuple[Mapping[str, Any], ...] = (scores or {}, metrics or {})
        else:
            sources = (trainer.callback_metrics, scores or {})
        self._seen = (scores, metrics)
        value = next((float(source[monitor]) for source in sources if monitor in source), math.nan)
        best: float | None = state.extra.get(self._fact)
        if not math.isfinite(value) or (best is not None and (value >= best if self._mode == "min" else value <= best)):
            return False
        state.extra[self._fact] = value  # goes into the checkpoint, so that a resumed run goes on from it
        return True
