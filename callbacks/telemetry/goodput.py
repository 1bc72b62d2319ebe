"""Measure how an attempt spends its time."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ...reporters.events.goodput import METRIC_PREFIX
from ..hook.events import FIGURES_FIELD, publish_figures
from ..hook.hook import Hook, skippable
from ..stop.sources import process_age_s

LOOK_EVERY_STEPS = 10
"""How often it looks at the clock."""


class Goodput(Hook):
    """Sends the seconds that an attempt has spent so far to every logger, as ``time/…``, at most every `every_s`.

    ``time/start_up`` is the time before the first step, ``time/data_wait`` the wait for data, ``time/checkpoint``,
    ``time/samples``, ``time/evaluation`` and ``time/rollout`` how long these delayed training, ``time/lost`` the time
    of steps that a roll-back has undone, and ``time/steps`` the rest. ``genlight events RUN --goodput`` adds up all
    attempts of a run.

    Time is measured at these events and not in each step, so that a step costs nothing.

    Args:
        every_s: Seconds between two reports; shorter runs report nothing. The last step reports as well.

    Raises:
        ValueError: `every_s` is not positive.
    """

    optional_reads = ("eval_scores",)  # reported after what evaluation holds training up by
    writes = (FIGURES_FIELD,)

    def __init__(self, every_s: float = 10.0) -> None:
        if not every_s > 0:  # nan is not
            raise ValueError(f"Invalid `every_s`. Expected a positive number of seconds, but received {every_s!r}.")
        self.every_s = every_s
        self._spent: dict[str, float] = {}
        self._held_since = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began_at = time.monotonic()
        self._next_at = self._began_at + self.every_s
        self._has_reported = False
        self._start_up_s = process_age_s()
        self._waited_s = data_wait_s(trainer)
        self._spent = {}
        self.next_due_step = 0

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, step = time.monotonic(), trainer.global_step
        is_last = trainer.should_stop or step == trainer.max_steps
        if now >= self._next_at or (is_last and self._has_reported):
            self._has_reported = True
            self._next_at = now + self.every_s
            publish_figures(trainer, self._seconds(trainer, now))
        self.next_due_step = step + LOOK_EVERY_STEPS
        if trainer.max_steps > step:
            self.next_due_step = min(self.next_due_step, trainer.max_steps)

    def _seconds(self, trainer: pl.Trainer, now: float) -> dict[str, float]:
        """The seconds that this attempt has spent until `now`, by the names of the metrics."""
        spent = dict(self._spent)
        if self._waited_s is not None:
            spent["data_wait"] = (data_wait_s(trainer) or 0.0) - self._waited_s
        spent["steps"] = max(now - self._began_at - sum(spent.values()), 0.0)
        spent["start_up"] = self._start_up_s
        return {METRIC_PREFIX + what: round(spent_s, 3) for what, spent_s in spent.items()}

    @override
    def on_time_spent(self, trainer: pl.Trainer, pl_module: pl.LightningModule, what: str, seconds: float) -> None:
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    @override
    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._held_since = time.monotonic()

    @override
    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_time_spent(trainer, pl_module, "rollout", time.monotonic() - self._held_since)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._held_since = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_time_spent(trainer, pl_module, "evaluation", time.monotonic() - self._held_since)


def data_wait_s(trainer: pl.Trainer) -> float | None:
    """Return the seconds that training has waited for data so far; None if the loader does not report them."""
    waited_s: float | None = getattr(trainer.train_dataloader, "wait_seconds", None)
    return waited_s
