"""Progress of a run for its users: on a terminal one line that is redrawn, otherwise a new line every few seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.live import Live
from rich.text import Text
from typing_extensions import override

from ..adapter.plumbing.text import printable
from ..reporters.events.event_logger import last_step
from .checkpoint.format.record import CheckpointRecord
from .hook.cadence import Pace, positive
from .hook.events import callbacks_of, hosted_by
from .hook.hook import Hook, skippable
from .upload_artifacts import UploadArtifacts

REDRAWN_EVERY_S = 0.1
WINDOW_S = 30.0
"""Period over which speed is measured; longer if it has fewer than two readings."""
MOST_VALUES = 3
"""Maximum number of scores, returns and logged values shown next to the loss."""
_ALWAYS = ("train/loss", "train/lr")
_RETURNS = ("return", "reward")


class JobProgress(Hook):
    """Shows step, loss, learning rate, scores and returns, speed, remaining time, checkpoints and uploads.

    A first line names class, parameters, device, precision and steps. Speed and remaining time are measured over the
    last half minute; data that ends before `max_steps` is taken into account. For a LightningModule it shows values
    that were logged with ``prog_bar=True``.

    Args:
        line_every_s: Seconds between lines if standard error is not a terminal.
        description: Text in front of the step.

    Raises:
        ValueError: `line_every_s` is not positive.
    """

    reads = ("loss_stats",)  # so that a line shows the loss of the same step
    _of_this_process = frozenset({"_live", "_uploads"})
    _live: Live | None = None
    _uploads: UploadArtifacts | None = None

    def __init__(self, *, line_every_s: float = 5.0, description: str = "") -> None:
        self.line_every_s = positive("line_every_s", line_every_s)
        self.description = description
        self._begin(every_s=line_every_s)

    def _begin(self, every_s: float) -> None:
        """Reset the line, for a new fit."""
        self._every_s, self._pace, self._next = every_s, Pace(every_s), 0.0
        self._shown_step = -1
        self._looks: deque[tuple[int, float]] = deque()
        """Steps and times of the readings. The first comes after the first step, which takes longer than others."""
        self._values: dict[str, float] = {}
        self._scores: dict[str, float] = {}
        self._saved: int | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sys.stderr.write(_header(trainer, pl_module) + "\n")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        self._begin(every_s=REDRAWN_EVERY_S if sys.stderr.isatty() else self.line_every_s)
        self._uploads = next((each for each in callbacks_of(trainer) if isinstance(each, UploadArtifacts)), None)
        if trainer.global_step:
            sys.stderr.write(f"continuing after step {trainer.global_step:,}\n")
        if sys.stderr.isatty():
            # Only the training thread draws: rich's own thread would interrupt it ten times a second.
            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()

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
        if hosted_by(pl_module) is not None:  # reading values of a LightningModule could wait for a failed device
            self._read(trainer, pl_module)
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        """Show the last step, even if it is not due, and keep the line."""
        if self._looks:
            self._show(trainer, time.monotonic())
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, trainer: pl.Trainer, now: float) -> None:
        """Write the line of this step."""
        step = trainer.global_step
        self._looks.append((step, now))
        while len(self._looks) > 2 and self._looks[0][1] < now - WINDOW_S:
            self._looks.popleft()
        line = "  ".join(self._parts(trainer))
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif step != self._shown_step:  # otherwise the line of this step was already written
            sys.stderr.write(f"{line}\n")
        self._shown_step = step

    def _read(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the newest metrics: a trainer class's loss, rate and returns, or a module's progress-bar values."""
        hosted = hosted_by(pl_module)
        if hosted is None:
            self._values = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        else:
            self._values = {
                name: value for name, value in hosted.published.items() if name in _ALWAYS or name.endswith(_RETURNS)
            }

    def _parts(self, trainer: pl.Trainer) -> list[str]:
        """Return the parts of the line, the most important first."""
        (first_step, began), (step, now) = self._looks[0], self._looks[-1]
        speed = (step - first_step) / max(now - began, 1e-9)
        limit, last = trainer.max_steps, last_step(trainer)
        others = {name: value for name, value in {**self._scores, **self._values}.items() if name not in _ALWAYS}
        loss, lr = (self._values.get(name) for name in _ALWAYS)
        parts = [self.description] if self.description else []
        parts.append(f"step {step}/{limit}" if limit > 0 else f"step {step}")
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        if step > first_step:
            parts.append(f"{speed:.1f} steps/s" if speed >= 1 else f"{speed:.2g} steps/s")
        if speed and last and step < last:
            parts.append(f"eta {timedelta(seconds=round((last - step) / speed))}")
        if limit <= 0 and trainer.max_epochs not in (None, -1):
            parts.append(f"epoch {min(trainer.current_epoch + 1, trainer.max_epochs)}/{trainer.max_epochs}")
        parts += [f"{printable(name)} {value:.4g}" for name, value in list(others.items())[:MOST_VALUES]]
        if lr is not None:
            parts.append(f"lr {lr:.3g}")
        if self._saved is not None:
            parts.append(f"saved {self._saved}")
        if self._uploads is not None and (waiting := self._uploads.waiting):
            parts.append(f"{waiting} uploads wait")
        return parts


def _header(trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
    """Return the header of a run, such as ``Tiny: 1,234 parameters, cpu, 32-true, 100 steps``."""
    name = type(getattr(pl_module, "plugin", pl_module)).__name__
    parameters = sum(parameter.numel() for parameter in pl_module.parameters())
    ranks = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    device, epochs = trainer.strategy.root_device.type, trainer.max_epochs
    steps = f"{epochs} epochs" if epochs not in (None, -1) else "no last step"
    steps = f"{trainer.max_steps:,} steps" if trainer.max_steps > 0 else steps
    return f"{name}: {parameters:,} parameters, {ranks}{device}, {trainer.precision}, {steps}"
