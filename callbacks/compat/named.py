"""The callbacks that the six-hook style comes with: thin, over the Lightning callbacks of this package."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ...adapter.plumbing.durable import write_bytes_durably
from ...adapter.plumbing.redaction import without_secrets
from ..checkpoint.policy import Checkpoint
from ..early_stopping import EarlyStopping
from ..health.diagnosis import Diagnosis
from ..hook.cadence import crossed
from ..hook.events import callbacks_of, run_state_of
from ..job_progress import JobProgress
from ..telemetry.heartbeat import Heartbeat
from .own_loop import OwnLoop
from .six_hooks import Callback
from .trainer_view import TrainerView

__all__ = [
    "CheckpointCallback",
    "DiagnosisCallback",
    "EarlyStoppingCallback",
    "EvalCallback",
    "HeartbeatCallback",
    "LoggingCallback",
    "ProgressCallback",
    "TrainingReportCallback",
]


class LoggingCallback(Callback):
    """Writes the metrics of a step to standard error at a cadence, and has them sent to Weights & Biases.

    Args:
        log_interval: Cadence in steps; 0 turns it off.
        use_wandb: Whether Lightning's ``WandbLogger`` joins the trainer's loggers, where none is among them.
        wandb_project: Its project; None is Lightning's ``lightning_logs``.
        wandb_run_name: The name that wandb shows; None has wandb choose one.

    Raises:
        ValueError: `log_interval` is negative.
        ModuleNotFoundError: `use_wandb` is set and wandb is not installed.
    """

    def __init__(
        self,
        log_interval: int = 100,
        *,
        use_wandb: bool = False,
        wandb_project: str | None = None,
        wandb_run_name: str | None = None,
    ) -> None:
        self.log_interval = _cadence("log_interval", log_interval)
        self.use_wandb = use_wandb
        self.wandb_project = wandb_project
        self.wandb_run_name = wandb_run_name
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
                named = WandbLogger(self.wandb_run_name, trainer.output_dir, project=self.wandb_project)
                trainer.lightning.loggers = [*loggers, named]

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

    def act_in_own_loop(self, loop: OwnLoop, hook: str) -> None:
        """Write the metrics of a step, where it is due."""
        if hook == "on_step_end" and loop.is_due(self, self.log_interval):
            metrics = getattr(loop.trainer, "metrics", None)
            named = metrics if isinstance(metrics, Mapping) else {"loss": loop.metric("loss")}
            shown = "  ".join(
                f"{name} {float(value):.4g}" for name, value in sorted(named.items()) if value is not None
            )
            sys.stderr.write(f"step {loop.global_step}  {shown}\n")


class CheckpointCallback(Callback):
    """Saves checkpoints at a cadence, and keeps the newest and the best.

    Args:
        save_interval: Cadence in steps; 0 turns it off.
        save_best: Whether the checkpoint with the smallest loss is kept.
        max_checkpoints: How many of the newest are kept; None keeps all.
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
        *,
        save_best: bool = True,
        max_checkpoints: int | None = 5,
        output_dir: str | os.PathLike[str] | None = None,
        format: Literal["genlight", "pt"] = "genlight",  # noqa: A002  # what users of the style would call it
    ) -> None:
        if max_checkpoints is not None and max_checkpoints < 1:
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
        self._keep(folder, self._step, trainer.metrics.get("loss", math.inf), trainer.save_checkpoint)

    def _keep(self, folder: Path, step: int, loss: float, save: Callable[[Path], object]) -> None:
        """Have `save` write the checkpoint of a step; remove the oldest beyond `max_checkpoints`."""
        path = folder / f"checkpoint_{step}.pt"
        save(path)
        self._written.append(path)
        while self.max_checkpoints is not None and len(self._written) > self.max_checkpoints:
            self._written.pop(0).unlink(missing_ok=True)
        if self.save_best and loss < self._best:
            self._best = loss
            save(folder / "checkpoint_best.pt")

    def act_in_own_loop(self, loop: OwnLoop, hook: str) -> None:
        """Have the trainer's own ``save_checkpoint(path)`` write the files of this style, where it is due.

        Raises:
            TypeError: It has no such method.
        """
        if hook != "on_step_end" or not loop.is_due(self, self.save_interval):
            return
        save = getattr(loop.trainer, "save_checkpoint", None)
        if save is None:
            raise TypeError(f"CheckpointCallback needs `save_checkpoint(path)` of {type(loop.trainer).__name__}.")
        loss = loop.metric("loss")
        folder = self.output_dir or Path(getattr(loop.trainer, "output_dir", ".")) / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        self._keep(folder, loop.global_step, math.inf if loss is None else loss, save)

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

    def __init__(self, patience: int = 5000, *, min_delta: float = 1e-4, monitor: str = "loss") -> None:
        self.early_stopping = EarlyStopping(monitor, patience, min_delta=min_delta)

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        return [self.early_stopping]

    def act_in_own_loop(self, loop: OwnLoop, hook: str) -> None:
        """Set the trainer's ``should_stop`` once the metric no longer improves."""
        if hook == "on_step_end":
            loop.stop_early(self.early_stopping)


class ProgressCallback(Callback):
    """Shows step, loss, speed and remaining time; see `JobProgress`.

    Args:
        desc: What stands before them.
    """

    def __init__(self, desc: str = "Training") -> None:
        self.desc = desc
        self._shown_at = time.monotonic()

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        shown = any(isinstance(callback, JobProgress) for callback in callbacks_of(trainer.lightning))
        return [] if shown else [JobProgress(description=self.desc)]

    def act_in_own_loop(self, loop: OwnLoop, hook: str) -> None:
        """Write the step about once a second."""
        if hook == "on_step_end" and time.monotonic() - self._shown_at >= 1:
            self._shown_at = time.monotonic()
            sys.stderr.write(f"{self.desc}: step {loop.global_step}\n")


class HeartbeatCallback(Callback):
    """Writes heartbeats of WASR telemetry; see `Heartbeat`.

    Args:
        interval_steps: Cadence in steps; 0 turns it off.
        scenario: What the run does, as events say it.
        run_id: The id of the run, where it has none of its own, as one of `genlight run` has.
        metrics_path: The telemetry file; None is ``WORLDFLUX_METRICS_PATH``, else ``.worldflux/metrics.jsonl``.

    Raises:
        ValueError: `interval_steps` is negative, or `scenario` is empty.
    """

    def __init__(
        self,
        interval_steps: int = 100,
        *,
        scenario: str = "trainer",
        run_id: str | None = None,
        metrics_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.run_id = run_id
        self.heartbeat = Heartbeat(interval_steps, scenario, path=metrics_path)

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        _name_run(trainer, self.run_id)
        return [self.heartbeat]

    def act_in_own_loop(self, loop: OwnLoop, hook: str) -> None:
        """Write a heartbeat, where it is due."""
        if hook == "on_step_end":
            loop.beat(self.heartbeat, self.run_id)


class DiagnosisCallback(Callback):
    """Tells when training goes wrong; see `Diagnosis`.

    Args:
        check_interval: Cadence in steps; 0 turns it off.
        gradient_min_norm: Gradients vanish where the largest norm of a parameter's gradient is below this.
        latent_std_min: Latent values have collapsed where their standard deviation is below this.
        scenario: As of `HeartbeatCallback`, and so are the next two.
        run_id: The id of the run, where it has none of its own.
        metrics_path: The telemetry file.

    Raises:
        ValueError: A number is negative, or `scenario` is empty.
    """

    def __init__(
        self,
        check_interval: int = 100,
        *,
        gradient_min_norm: float = 1e-8,
        latent_std_min: float = 1e-6,
        scenario: str = "trainer",
        run_id: str | None = None,
        metrics_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.run_id = run_id
        self.diagnosis = Diagnosis(
            check_interval, gradient_min_norm, latent_std_min, scenario=scenario, path=metrics_path
        )

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        _name_run(trainer, self.run_id)
        return [self.diagnosis]

    def act_in_own_loop(self, loop: OwnLoop, hook: str) -> None:
        """Look at the losses and the gradients of the trainer's ``model``, where it is due."""
        if hook == "on_step_end":
            loop.diagnose(self.diagnosis, self.run_id)


class EvalCallback(Callback):
    """Calls a function of yours at a cadence and logs the scores that it returns.

    Args:
        evaluate: Takes the trainer, a `TrainerView`; its result is a mapping of names to numbers, or None.
        eval_interval: Cadence in steps; 0 turns it off.

    Raises:
        ValueError: `eval_interval` is negative.
    """

    def __init__(
        self, evaluate: Callable[[TrainerView], Mapping[str, float] | None], eval_interval: int = 1000
    ) -> None:
        self.evaluate = evaluate
        self.eval_interval = _cadence("eval_interval", eval_interval)
        self._step = 0

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        self._step = trainer.global_step

    @override
    def on_step_end(self, trainer: TrainerView) -> None:
        before, self._step = self._step, trainer.global_step
        if not crossed(before, self._step, self.eval_interval):
            return
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            with torch.no_grad():
                scores = self.evaluate(trainer) or {}
        finally:
            trainer.model.train(was_training)
        for logger in trainer.lightning.loggers:
            logger.log_metrics(
                metrics={f"eval/{name}": float(value) for name, value in scores.items()}, step=self._step
            )


class TrainingReportCallback(Callback):
    """Writes a JSON file when training has ended: steps, losses, times and the configuration, without secrets.

    Args:
        path: The file; None is ``training_report.json`` where the run puts its files.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)

    @override
    def on_step_end(self, trainer: TrainerView) -> None:
        """Counts, so that the view has each step's loss."""

    @override
    def on_train_end(self, trainer: TrainerView) -> None:
        numbers = {"loss": trainer.loss, "best_loss": trainer.best_loss, **trainer.runtime_profile()}
        report = {
            "run_id": trainer.run_id,
            "global_step": trainer.global_step,
            "epoch": trainer.epoch,
            "train_start_time": trainer.train_start_time,
            # JSON has no nan and no infinity.
            **{name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()},
            "metrics": {name: value if math.isfinite(value) else None for name, value in trainer.metrics.items()},
            "config": without_secrets(vars(trainer.config)),
        }
        text = json.dumps(report, indent=2, sort_keys=True, default=str)
        write_bytes_durably(self.path or trainer.output_dir / "training_report.json", f"{text}\n".encode())


def _name_run(trainer: TrainerView, run_id: str | None) -> None:
    state = run_state_of(trainer.lightning)
    state.run_id = state.run_id or run_id or ""


def _cadence(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"Invalid `{name}`. Expected a number >= 0, but received {value}.")
    return value
