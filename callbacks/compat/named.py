"""The callbacks that the six-hook style comes with: thin, over the Lightning callbacks of this package."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from ..checkpoint.policy import Checkpoint
from ..early_stopping import EarlyStopping
from ..health.diagnosis import Diagnosis
from ..hook.cadence import crossed
from ..hook.events import callbacks_of
from ..job_progress import JobProgress
from ..telemetry.heartbeat import Heartbeat
from .six_hooks import Callback
from .trainer_view import TrainerView

__all__ = [
    "CheckpointCallback",
    "DiagnosisCallback",
    "EarlyStoppingCallback",
    "HeartbeatCallback",
    "LoggingCallback",
    "ProgressCallback",
]


class LoggingCallback(Callback):
    """Writes the metrics of a step to standard error at a cadence, and has them sent to Weights & Biases.

    Args:
        log_interval: Cadence in steps; 0 turns it off.
        use_wandb: Whether Lightning's ``WandbLogger`` joins the trainer's loggers, where none is among them.

    Raises:
        ValueError: `log_interval` is negative.
        ModuleNotFoundError: `use_wandb` is set and wandb is not installed.
    """

    def __init__(self, log_interval: int = 100, use_wandb: bool = False) -> None:
        self.log_interval = _cadence("log_interval", log_interval)
        self.use_wandb = use_wandb
        self._step = 0
        if use_wandb and importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError("use_wandb needs wandb: pip install genlight[wandb]")

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        self._step = trainer.global_step
        if self.use_wandb:
            from lightning.pytorch.loggers import WandbLogger

            loggers = trainer.lightning.loggers
            if not any(isinstance(logger, WandbLogger) for logger in loggers):
                trainer.lightning.loggers = [*loggers, WandbLogger(save_dir=trainer.output_dir)]

    @override
    def on_step_end(self, trainer: TrainerView) -> None:
        before, self._step = self._step, trainer.global_step
        if not crossed(before, self._step, self.log_interval):
            return
        shown = "  ".join(f"{name} {value:.4g}" for name, value in sorted(trainer.metrics.items()))
        sys.stderr.write(f"step {self._step}  {shown}\n")
        if not hasattr(trainer.module, "step_result"):  # a hosted trainer's metrics are sent by `LogMetrics`
            for logger in trainer.lightning.loggers:
                logger.log_metrics(metrics=trainer.metrics, step=self._step)


class CheckpointCallback(Callback):
    """Saves checkpoints at a cadence, and keeps the newest and the best.

    Args:
        save_interval: Cadence in steps; 0 turns it off.
        save_best: Whether the checkpoint with the smallest loss is kept.
        max_checkpoints: How many of the newest are kept.
        output_dir: Where they go; None is ``<default_root_dir>/checkpoints``.
        format: ``genlight`` saves with `Checkpoint`, from which a run resumes exactly; ``pt`` writes the files of this
            style (``checkpoint_<step>.pt``, ``checkpoint_best.pt``) by ``trainer.save_checkpoint``.

    Raises:
        ValueError: A number is negative, `max_checkpoints` is 0, or `format` is unknown.
    """

    critical = True

    def __init__(
        self,
        save_interval: int = 1000,
        save_best: bool = True,
        max_checkpoints: int = 5,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        format: Literal["genlight", "pt"] = "genlight",  # noqa: A002  # what users of the style would call it
    ) -> None:
        if max_checkpoints < 1:
            raise ValueError(f"Invalid `max_checkpoints`. Expected a number >= 1, but received {max_checkpoints}.")
        if format not in ("genlight", "pt"):
            raise ValueError(f"Invalid `format`. Expected 'genlight' or 'pt', but received {format!r}.")
        self.save_interval = _cadence("save_interval", save_interval)
        self.save_best = save_best
        self.max_checkpoints = max_checkpoints
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.format = format
        self._step = 0
        self._best = math.inf
        self._written: list[Path] = []

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        if self.format == "pt":
            return []
        is_hosted = hasattr(trainer.module, "step_result")
        return [
            Checkpoint(
                self.output_dir,
                every_n_steps=self.save_interval,
                keep_last=self.max_checkpoints,
                # Another module logs its loss under a name of its own, or not at all.
                monitor="train/loss" if self.save_best and is_hosted else None,
            )
        ]

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        self._step = trainer.global_step

    @override
    def on_step_end(self, trainer: TrainerView) -> None:
        before, self._step = self._step, trainer.global_step
        if self.format != "pt" or not crossed(before, self._step, self.save_interval):
            return
        folder = self.output_dir or trainer.output_dir / "checkpoints"
        loss = trainer.metrics.get("loss", math.inf)
        self._written.append(trainer.save_checkpoint(folder / f"checkpoint_{self._step}.pt"))
        while len(self._written) > self.max_checkpoints:
            self._written.pop(0).unlink(missing_ok=True)
        if self.save_best and loss < self._best:
            self._best = loss
            trainer.save_checkpoint(folder / "checkpoint_best.pt")

    def state_dict(self) -> dict[str, Any]:
        """What was written and what was best, for a resume."""
        return {"best": self._best, "written": [str(path) for path in self._written]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what a checkpoint of the run says."""
        self._best, self._written = state_dict["best"], [Path(path) for path in state_dict["written"]]


class EarlyStoppingCallback(Callback):
    """Ends training once the monitored metric no longer improves; see `EarlyStopping`.

    Args:
        patience: Steps without an improvement after which training ends.
        min_delta: By how much a value must be smaller than the best one to be an improvement.
        monitor: Name of the metric.

    Raises:
        ValueError: An argument makes no sense.
    """

    def __init__(self, patience: int = 5000, min_delta: float = 1e-4, monitor: str = "loss") -> None:
        self.early_stopping = EarlyStopping(monitor, patience, min_delta=min_delta)

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        return [self.early_stopping]


class ProgressCallback(Callback):
    """Shows step, loss, speed and remaining time; see `JobProgress`.

    Args:
        desc: What stands before them.
    """

    def __init__(self, desc: str = "Training") -> None:
        self.desc = desc

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        shown = any(isinstance(callback, JobProgress) for callback in callbacks_of(trainer.lightning))
        return [] if shown else [JobProgress(description=self.desc)]


class HeartbeatCallback(Callback):
    """Writes heartbeats of WASR telemetry; see `Heartbeat`.

    Args:
        interval_steps: Cadence in steps; 0 turns it off.
        scenario: What the run does, as events say it.

    Raises:
        ValueError: `interval_steps` is negative, or `scenario` is empty.
    """

    def __init__(self, interval_steps: int = 100, scenario: str = "trainer") -> None:
        self.heartbeat = Heartbeat(interval_steps, scenario)

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        return [self.heartbeat]


class DiagnosisCallback(Callback):
    """Tells when training goes wrong; see `Diagnosis`.

    Args:
        check_interval: Cadence in steps; 0 turns it off.
        gradient_min_norm: Gradients vanish where the largest norm of a parameter's gradient is below this.
        latent_std_min: Latent values have collapsed where their standard deviation is below this.

    Raises:
        ValueError: A number is negative.
    """

    def __init__(
        self, check_interval: int = 100, gradient_min_norm: float = 1e-8, latent_std_min: float = 1e-6
    ) -> None:
        self.diagnosis = Diagnosis(check_interval, gradient_min_norm, latent_std_min)

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        return [self.diagnosis]


def _cadence(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"Invalid `{name}`. Expected a number >= 0, but received {value}.")
    return value
