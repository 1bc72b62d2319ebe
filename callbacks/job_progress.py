"""Progress of a run for its users: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from typing_extensions import override

from ..adapter.plumbing.text import printable
from ..reporters.events.event_logger import last_step
from .checkpoint.format.record import CheckpointRecord
from .hook.cadence import Pace
from .hook.events import callbacks_of
from .hook.hook import Hook, skippable
from .upload_artifacts import UploadArtifacts

__all__ = ["JobProgress"]

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.1
BAR_FROM_COLUMNS = 100
WINDOW_S = 30.0
"""Speed is that of the steps of so many seconds, and of two looks at least."""
MOST_VALUES = 3
"""How many scores, returns and values of the module's own are shown beside the loss."""
BAR_COLUMNS = 41
_ALWAYS = ("train/loss", "train/lr")
_RETURNS = ("return", "reward")


class JobProgress(Hook):
    """Shows step, loss, learning rate, scores and returns, speed, remaining time, checkpoints and uploads.

    A first line names class, parameters, device, precision and steps. Speed and remaining time are those of the last
    half minute; data that ends before `max_steps` is taken into account. For a module that is no trainer class it
    shows what was logged with ``prog_bar=True``.

    Args:
        line_every_s: Seconds between lines where standard error is not a terminal.
        description: Text in front of the step.

    Raises:
        ValueError: `line_every_s` is not positive.
    """

    reads = ("loss_stats",)  # so that a line shows the loss of its own step
    _of_this_process = frozenset({"_bar", "_task", "_uploads"})
    _bar: Progress | None = None
    _task: TaskID | None = None
    _uploads: UploadArtifacts | None = None

    def __init__(self, *, line_every_s: float = LINE_EVERY_S, description: str = "") -> None:
        if not line_every_s > 0:  # nan is not
            raise ValueError(f"Invalid `line_every_s`. Expected a number > 0, but received {line_every_s}.")
        self.line_every_s = line_every_s
        self.description = description
        self._every_s = line_every_s
        self._pace = Pace(line_every_s)
        self._next = 0.0
        self._shown_step = -1
        self._looks: deque[tuple[int, float]] = deque()
        """Steps and times, from the end of the first step on, whose own time says nothing about the others."""
        self._values: dict[str, float] = {}
        self._scores: dict[str, float] = {}
        self._saved: int | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sys.stderr.write(_header(trainer, pl_module) + "\n")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._looks.clear()
        self._shown_step = -1
        self._values, self._scores, self._saved = {}, {}, None
        self._uploads = next((each for each in callbacks_of(trainer) if isinstance(each, UploadArtifacts)), None)
        if trainer.global_step:
            sys.stderr.write(f"going on after step {trainer.global_step:,}\n")
        self._next = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._every_s = BAR_EVERY_S if is_terminal else self.line_every_s
        self._stop()
        self._pace = Pace(self._every_s)
        if not is_terminal:
            return
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(f"{self.description} step".strip(), markup=False),
            TextColumn("{task.fields[count]}", markup=False),
            # On a narrow terminal the numbers need its room.
            *([BarColumn()] if console.width >= BAR_FROM_COLUMNS else []),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            # Drawn from the training thread only: rich's own thread would take turns with it ten times a second.
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=_limit(trainer), completed=trainer.global_step, count="", state="")
        self._bar.start()

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.next_due_step = self._pace.next_look(trainer.global_step)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._read(trainer, pl_module)
            self._show(trainer, now)

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        self._scores = {**self._scores, **scores}

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        self._saved = record.step

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._looks.clear()
        self._shown_step = -1

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read(trainer, pl_module)
        self._end(trainer)

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if hasattr(pl_module, "published"):  # of another module, values may wait for a device that has failed
            self._read(trainer, pl_module)
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        """Show the last step, whose turn may not have come, and leave the line as it is."""
        if self._looks:
            self._show(trainer, time.monotonic())
        self._stop()

    def _show(self, trainer: pl.Trainer, now: float) -> None:
        step, limit = trainer.global_step, _limit(trainer)
        self._looks.append((step, now))
        while len(self._looks) > 2 and self._looks[0][1] < now - WINDOW_S:
            self._looks.popleft()
        count, state = f"{step}/{limit}" if limit else str(step), self._state(trainer, limit)
        if self._bar is not None and self._task is not None:
            bar = BAR_COLUMNS if self._bar.console.width >= BAR_FROM_COLUMNS else 0
            room = self._bar.console.width - len(f"{self.description} step {count} ".lstrip()) - bar
            self._bar.update(self._task, completed=step, count=count, state=_fitting(state, room), refresh=True)
        elif step != self._shown_step:  # else that was the line of the last step
            self._shown_step = step
            sys.stderr.write("  ".join(filter(None, [self.description, f"step {count}", *state])) + "\n")

    def _read(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The metrics logged last: of a trainer class loss, rate and returns, of another module those for the bar."""
        published: Mapping[str, float] | None = getattr(pl_module, "published", None)
        if published is None:
            self._values = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        else:
            self._values = {
                name: value for name, value in published.items() if name in _ALWAYS or name.endswith(_RETURNS)
            }

    def _state(self, trainer: pl.Trainer, limit: int | None) -> list[str]:
        """The parts of the line besides the step, the most important first."""
        (first_step, began), (step, now) = self._looks[0], self._looks[-1]
        speed = (step - first_step) / max(now - began, 1e-9)
        last = last_step(trainer)
        eta = timedelta(seconds=round((last - step) / speed)) if speed and last and step < last else None
        others = {name: value for name, value in {**self._scores, **self._values}.items() if name not in _ALWAYS}
        loss, lr = (self._values.get(name) for name in _ALWAYS)
        epochs = None if limit or trainer.max_epochs == -1 else trainer.max_epochs
        waiting = 0 if self._uploads is None else self._uploads.waiting
        return [
            *([] if loss is None else [f"loss {loss:.4g}"]),
            *([f"{speed:.1f} steps/s" if speed >= 1 else f"{speed:.2g} steps/s"] if step > first_step else []),
            *([] if eta is None else [f"eta {eta}"]),
            *([] if epochs is None else [f"epoch {min(trainer.current_epoch + 1, epochs)}/{epochs}"]),
            *(f"{printable(name)} {value:.4g}" for name, value in list(others.items())[:MOST_VALUES]),
            *([] if lr is None else [f"lr {lr:.3g}"]),
            *([] if self._saved is None else [f"saved {self._saved}"]),
            *([f"{waiting} uploads wait"] if waiting else []),
        ]

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _fitting(texts: Sequence[str], columns: int) -> str:
    """As many of `texts` as a line of `columns` has room for; rich would cut numbers short."""
    while texts and len("  ".join(texts)) > columns:
        texts = texts[:-1]
    return "  ".join(texts)


def _limit(trainer: pl.Trainer) -> int | None:
    return trainer.max_steps if trainer.max_steps > 0 else None


def _header(trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
    """A header for the run: ``Tiny: 1,234 parameters, cpu, 32-true, 100 steps``."""
    parameters = list(pl_module.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    ranks = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    limit = _limit(trainer)
    epochs = trainer.max_epochs
    steps = f"{limit:,} steps" if limit else f"{epochs} epochs" if epochs not in (None, -1) else "no last step"
    return ", ".join(
        [
            f"{type(getattr(pl_module, 'plugin', pl_module)).__name__}: {count:,} parameters",
            *([f"{frozen:,} of them frozen"] if frozen else []),
            f"{ranks}{trainer.strategy.root_device.type}",
            str(trainer.precision),
            steps,
        ]
    )
