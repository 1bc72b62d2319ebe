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
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ...adapter.plumbing.durable import write_bytes_durably
from ...adapter.plumbing.redaction import without_secrets
from ..checkpoint.policy import Checkpoint
from ..early_stopping import EarlyStopping
from ..health.diagnosis import Diagnosis
from ..health.rules import Reading
from ..hook.cadence import crossed
from ..hook.events import callbacks_of, log_to_loggers, run_state_of
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


class _Periodic(Callback):
    """Acts at the end of every so many steps; 0 turns it off."""

    takes_own_loop = False
    """Whether a loop of one's own is handed to it as an `OwnLoop`, and not as the trainer object that it has."""

    def __init__(self, name: str, every: int) -> None:
        if every < 0:
            raise ValueError(f"Invalid `{name}`. Expected a number >= 0, but received {every}.")
        self._every = every
        self._step = 0

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        self._step = trainer.global_step

    @override
    def on_step_end(self, trainer: TrainerView | OwnLoop) -> None:
        before, self._step = self._step, trainer.global_step
        if crossed(before, self._step, self._every):
            self.act(trainer)

    def act(self, trainer: Any) -> None:
        """A step has ended at which this is due."""
        raise NotImplementedError


class LoggingCallback(_Periodic):
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

    takes_own_loop = True

    def __init__(
        self,
        log_interval: int = 100,
        *,
        use_wandb: bool = False,
        wandb_project: str | None = None,
        wandb_run_name: str | None = None,
    ) -> None:
        super().__init__("log_interval", log_interval)
        self.use_wandb = self.needs_lightning = use_wandb
        self.wandb_project = wandb_project
        self.wandb_run_name = wandb_run_name
        if use_wandb and importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError("use_wandb needs wandb: pip install genlight[wandb]")

    @override
    def on_train_begin(self, trainer: Any) -> None:
        super().on_train_begin(trainer)
        if self.use_wandb:
            from lightning.pytorch.loggers import WandbLogger

            loggers = trainer.lightning.loggers
            if not any(isinstance(logger, WandbLogger) for logger in loggers):
                named = WandbLogger(self.wandb_run_name, trainer.output_dir, project=self.wandb_project)
                trainer.lightning.loggers = [*loggers, named]

    @override
    def act(self, trainer: TrainerView | OwnLoop) -> None:
        metrics = trainer.metrics
        shown = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
        sys.stderr.write(f"step {self._step}  {shown}\n")
        if not hasattr(getattr(trainer, "module", None), "step_result"):  # whose metrics are sent by `LogMetrics`
            _send(trainer, metrics, self._step)


class CheckpointCallback(_Periodic):
    """Saves checkpoints with `Checkpoint` at a cadence, and keeps the newest and the best.

    In a loop of one's own the trainer's ``save_checkpoint(path)`` writes ``checkpoint_<step>.pt`` and
    ``checkpoint_best.pt``; under Lightning, a callback that calls it does.

    Args:
        save_interval: Cadence in steps; 0 turns it off.
        save_best: Whether the checkpoint with the smallest loss is kept.
        max_checkpoints: How many of the newest are kept; None keeps all.
        output_dir: Where they go; None is ``<default_root_dir>/checkpoints``.

    Raises:
        ValueError: A number is negative, or `max_checkpoints` is 0.
    """

    critical = True
    takes_own_loop = True

    def __init__(
        self,
        save_interval: int = 1000,
        *,
        save_best: bool = True,
        max_checkpoints: int | None = 5,
        output_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_checkpoints is not None and max_checkpoints < 1:
            raise ValueError(f"Invalid `max_checkpoints`. Expected a number >= 1, but received {max_checkpoints}.")
        super().__init__("save_interval", save_interval)
        self.save_best = save_best
        self.max_checkpoints = max_checkpoints
        self.output_dir = None if output_dir is None else Path(output_dir)
        self._best = math.inf
        self._written: list[Path] = []

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        is_hosted = hasattr(trainer.module, "step_result")
        return [
            Checkpoint(
                self.output_dir,
                every_n_steps=self._every,
                keep_last=self.max_checkpoints,
                # Another module logs its loss under a name of its own, or not at all.
                monitor="train/loss" if self.save_best and is_hosted else None,
            )
        ]

    @override
    def act(self, trainer: TrainerView | OwnLoop) -> None:
        if not isinstance(trainer, OwnLoop):
            return
        folder = self.output_dir or trainer.output_dir / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"checkpoint_{self._step}.pt"
        trainer.save_checkpoint(path)
        self._written.append(path)
        while self.max_checkpoints is not None and len(self._written) > self.max_checkpoints:
            self._written.pop(0).unlink(missing_ok=True)
        loss = trainer.metrics.get("loss", math.inf)
        if self.save_best and loss < self._best:
            self._best = loss
            trainer.save_checkpoint(folder / "checkpoint_best.pt")


class EvalCallback(_Periodic):
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
        super().__init__("eval_interval", eval_interval)
        self.evaluate = evaluate

    @override
    def act(self, trainer: TrainerView) -> None:
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            with torch.no_grad():
                scores = self.evaluate(trainer) or {}
        finally:
            trainer.model.train(was_training)
        _send(trainer, {f"eval/{name}": float(value) for name, value in scores.items()}, self._step)


class _StandsFor(_Periodic):
    """Stands for one of genlight's own callbacks, which needs Lightning; in a loop of one's own it acts itself."""

    takes_own_loop = True

    def __init__(self, callback: Any, every: int = 1, run_id: str | None = None) -> None:
        super().__init__("every", every)
        self.callback = callback
        self.run_id = run_id

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        state = run_state_of(trainer.lightning)
        state.run_id = state.run_id or self.run_id or ""
        return [self.callback]

    @override
    def act(self, trainer: TrainerView | OwnLoop) -> None:
        if isinstance(trainer, OwnLoop):
            trainer.name_run(self.run_id)
            self.act_in_own_loop(trainer)

    def act_in_own_loop(self, loop: OwnLoop) -> None:
        """Do what the callback does at a step at which it is due."""
        raise NotImplementedError


class EarlyStoppingCallback(_StandsFor):
    """Ends training once the monitored metric no longer improves; see `EarlyStopping`.

    Args:
        patience: Steps without an improvement after which training ends.
        min_delta: By how much a value must be smaller than the best one to be an improvement.
        monitor: Name of the metric.

    Raises:
        ValueError: An argument makes no sense.
    """

    def __init__(self, patience: int = 5000, *, min_delta: float = 1e-4, monitor: str = "loss") -> None:
        super().__init__(EarlyStopping(monitor, patience, min_delta=min_delta))

    @override
    def act_in_own_loop(self, loop: OwnLoop) -> None:
        monitor = self.callback.monitor
        value = loop.metric(monitor)
        self.callback.judge(loop, {} if value is None else {monitor: value}, loop.global_step)


class ProgressCallback(_StandsFor):
    """Shows step, loss, speed and remaining time; see `JobProgress`.

    Args:
        desc: Text in front.
    """

    def __init__(self, desc: str = "Training") -> None:
        super().__init__(JobProgress(description=desc))
        self._shown_at = time.monotonic()

    @override
    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        is_shown = any(isinstance(callback, JobProgress) for callback in callbacks_of(trainer.lightning))
        return [] if is_shown else [self.callback]

    @override
    def act_in_own_loop(self, loop: OwnLoop) -> None:
        if time.monotonic() - self._shown_at >= 1:  # about once a second
            self._shown_at = time.monotonic()
            sys.stderr.write(f"{self.callback.description}: step {loop.global_step}\n")


class HeartbeatCallback(_StandsFor):
    """Writes heartbeats of WASR telemetry; see `Heartbeat`.

    Args:
        interval_steps: Cadence in steps; 0 turns it off.
        scenario: Name of the scenario in the events.
        run_id: Id of a run that has none.
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
        super().__init__(Heartbeat(interval_steps, scenario, path=metrics_path), interval_steps, run_id)

    @override
    def act_in_own_loop(self, loop: OwnLoop) -> None:
        seconds = time.monotonic() - loop.began_at
        self.callback.events.write(
            loop,
            event="heartbeat",
            success=True,
            duration_sec=seconds,
            ttfi_sec=loop.first_step_s,
            throughput_steps_per_sec=(loop.global_step - loop.first_step) / seconds if seconds else None,
        )


class DiagnosisCallback(_StandsFor):
    """Reports when training goes wrong; see `Diagnosis`.

    Args:
        check_interval: Cadence in steps; 0 turns it off.
        gradient_min_norm: Gradients vanish where the largest norm of a parameter's gradient is below this.
        latent_std_min: Latent values have collapsed where their standard deviation is below this.
        scenario: Name of the scenario in the events.
        run_id: Id of a run that has none.
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
        limits = (gradient_min_norm, latent_std_min)
        diagnosis = Diagnosis(check_interval, *limits, scenario=scenario, path=metrics_path)
        super().__init__(diagnosis, check_interval, run_id)

    @override
    def act_in_own_loop(self, loop: OwnLoop) -> None:
        """Judge the losses, the gradients that the step has left, and the spread of latent values."""
        named = getattr(getattr(loop.trainer, "model", None), "named_parameters", dict)
        norms = {name: float(value.grad.norm()) for name, value in dict(named()).items() if value.grad is not None}
        spreads = ((name, loop.metric(name)) for name in ("latent_std", "z_std"))
        latent = next(((name, value) for name, value in spreads if value is not None), None)
        norms = {name: norm if math.isfinite(norm) else math.nan for name, norm in norms.items()}
        self.callback.judge(loop, Reading(loop.global_step, norms, losses=loop.take_losses(), latent=latent))


class TrainingReportCallback(Callback):
    """Writes a JSON file when training has ended: steps, losses, times and the configuration, without secrets.

    Args:
        path: The file; None is ``training_report.json`` where the run puts its files.
    """

    needs_lightning = True

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
            **_finite(numbers),
            "metrics": _finite(trainer.metrics),
            "config": without_secrets(vars(trainer.config)),
        }
        text = json.dumps(report, indent=2, sort_keys=True, default=str)
        write_bytes_durably(self.path or trainer.output_dir / "training_report.json", f"{text}\n".encode())


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    """`numbers`, of which those that are nan or infinite, which JSON does not have, become null."""
    return {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()}


def _send(trainer: Any, metrics: Mapping[str, float], step: int) -> None:
    """Send metrics to the loggers of the Lightning trainer; a loop of one's own has none."""
    lightning = getattr(trainer, "lightning", None)
    if lightning is not None:
        log_to_loggers(lightning, metrics, step)
