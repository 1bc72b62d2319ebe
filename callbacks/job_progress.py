"""Progress of a run for its users: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typing_extensions import override

from .hook.hook import Hook
from .hook.listeners import skippable
from .hook.ticker import Ticker

__all__ = ["JobProgress"]

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.1
BAR_FROM_COLUMNS = 80


class JobProgress(Hook):
    """Shows step, loss, speed and remaining time.

    Args:
        line_every_s: Seconds between lines where standard error is not a terminal.
        description: What stands before the step.

    Raises:
        ValueError: `line_every_s` is not positive.
    """

    reads = ("loss_stats",)  # so that a line shows the loss of its own step
    _of_this_process = frozenset({"_bar", "_task", "_ticker"})
    _bar: Progress | None = None
    _task: TaskID | None = None
    _ticker: Ticker | None = None

    def __init__(self, *, line_every_s: float = LINE_EVERY_S, description: str = "") -> None:
        if not line_every_s > 0:  # nan is not
            raise ValueError(f"Invalid `line_every_s`. Expected a number > 0, but received {line_every_s}.")
        self.line_every_s = line_every_s
        self.description = description
        self._every_s = line_every_s
        self._next = 0.0
        self._shown_step = -1
        self._measured_from: tuple[int, float] | None = None
        """Step and time at the end of the first step, whose own time says nothing about the others."""
        self._loss: float | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._measured_from = None
        self._shown_step = -1
        self._loss = None
        self._next = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._every_s = BAR_EVERY_S if is_terminal else self.line_every_s
        self._stop()
        self._ticker = Ticker(self, self._every_s, lambda: self._next)
        self._ticker.start()
        if not is_terminal:
            return
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(f"{self.description} step".strip(), markup=False),
            MofNCompleteColumn(),
            # On a narrow terminal rich would cut the numbers short to have room for it.
            *([BarColumn()] if console.width >= BAR_FROM_COLUMNS else []),
            TextColumn("{task.fields[loss]}  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            # Drawn from the training thread only: rich's own thread would take turns with it ten times a second.
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=_limit(trainer), completed=trainer.global_step, loss="", speed="")
        self._bar.start()

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._ticker is not None:
            self._ticker.rest()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._show(trainer, now)

    @override
    def on_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Mapping[str, float], step: int
    ) -> None:
        self._loss = metrics.get("train/loss", self._loss)

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._measured_from, self._shown_step = None, -1

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer, time.monotonic())
        self._stop()

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _show(self, trainer: pl.Trainer, now: float) -> None:
        step = trainer.global_step
        first_step, began = self._measured_from = self._measured_from or (step, now)
        speed = (step - first_step) / max(now - began, 1e-9)
        speed_text = f"{speed:.1f} steps/s" if step > first_step else ""
        loss_text = "" if self._loss is None else f"loss {self._loss:.4g}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, loss=loss_text, speed=speed_text, refresh=True)
            return
        limit = _limit(trainer)
        left = f"eta {timedelta(seconds=round((limit - step) / speed))}" if speed and limit and step < limit else ""
        if step == self._shown_step:
            return  # that was the line of the last step
        self._shown_step = step
        shown = [self.description, f"step {step}/{limit}" if limit else f"step {step}", loss_text, speed_text, left]
        sys.stderr.write("  ".join(filter(None, shown)) + "\n")

    def _stop(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _limit(trainer: pl.Trainer) -> int | None:
    return trainer.max_steps if trainer.max_steps > 0 else None
