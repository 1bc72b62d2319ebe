"""The six-hook style: the base class of its callbacks, its ready-made callbacks, and the list that runs them.

A ready-made callback is a subclass of genlight's callback for the same purpose, if there is one. `CallbackList` runs
callbacks of the style under Lightning.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import lightning.pytorch as pl
import msgspec
import torch
from typing_extensions import override

from ...adapter.plumbing.durable import write_bytes_durably
from ...adapter.plumbing.redaction import without_secrets
from ...adapter.plumbing.text import require
from ..checkpoint.policy import Checkpoint
from ..early_stopping import EarlyStopping
from ..health.diagnosis import Diagnosis
from ..hook.cadence import crossed, step_cadence
from ..hook.events import callbacks_of, hosted_by, log_to_loggers, run_state_of
from ..hook.hook import Hook, order_callbacks
from ..job_progress import JobProgress
from ..other_styles import OtherStyle, StyleAdapter, forwarding_hook, require_events
from ..telemetry import Heartbeat
from .trainer_view import TrainerView, view_of

HOOKS: Final = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end")
"""The six hooks."""


class Callback(OtherStyle):
    """Base of callbacks whose hooks take the trainer, a `TrainerView`; a subclass overrides the hooks it needs.

    Put them into a `CallbackList`, which is a Lightning callback: ``Trainer(callbacks=[CallbackList([Mine()])])``.
    """

    _style, _place = "a callback of the six-hook style", "CallbackList([{}])"
    critical: bool = False
    """Whether an exception of this callback ends the run; otherwise it is logged once for each hook and counted."""
    ranks: Literal["zero", "all"] = "zero"
    """The ranks that run it."""

    def on_train_begin(self, trainer: Any) -> None:
        """Training begins, in a new run or a resumed one."""

    def on_train_end(self, trainer: Any) -> None:
        """Training has ended as planned."""

    def on_epoch_begin(self, trainer: Any) -> None:
        """An epoch begins."""

    def on_epoch_end(self, trainer: Any) -> None:
        """An epoch has ended."""

    def on_step_begin(self, trainer: Any) -> None:
        """A step begins."""

    def on_step_end(self, trainer: Any) -> None:
        """A step has ended; ``trainer.metrics`` are the metrics of this step."""


class NeedsFit(Callback):
    """A callback whose hooks need a `TrainerView`, so that it cannot run in your own loop."""


class _Periodic(NeedsFit):
    """Acts at a cadence of steps; 0 turns it off."""

    def __init__(self, name: str, every: int) -> None:
        self._every = step_cadence(name, every)
        self._step = 0

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        self._step = trainer.global_step

    @override
    def on_step_end(self, trainer: TrainerView) -> None:
        before, self._step = self._step, trainer.global_step
        if crossed(before, self._step, self._every):
            self.act(trainer)

    def act(self, trainer: TrainerView) -> None:
        """Do the work of this callback, at the end of a step at which it is due."""
        raise NotImplementedError


class LoggingCallback(_Periodic):
    """Writes the metrics of a step to standard error at a cadence, and sends them to the trainer's loggers.

    Args:
        log_interval: Cadence in steps; 0 turns it off.
        use_wandb: Whether to add Lightning's ``WandbLogger`` to the trainer's loggers, if there is none.
        wandb_project: Project of that logger; None means Lightning's default, ``lightning_logs``.
        wandb_run_name: The name that wandb shows; with None, wandb chooses one.

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
        super().__init__("log_interval", log_interval)
        self.use_wandb = use_wandb
        self.wandb_project = wandb_project
        self.wandb_run_name = wandb_run_name
        if use_wandb and importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError("use_wandb needs wandb: pip install wandb")

    @override
    def on_train_begin(self, trainer: TrainerView) -> None:
        super().on_train_begin(trainer)
        if self.use_wandb:
            from lightning.pytorch.loggers import WandbLogger

            loggers = trainer.lightning.loggers
            if not any(isinstance(logger, WandbLogger) for logger in loggers):
                named = WandbLogger(self.wandb_run_name, trainer.output_dir, project=self.wandb_project)
                trainer.lightning.loggers = [*loggers, named]

    @override
    def act(self, trainer: TrainerView) -> None:
        metrics = trainer.metrics
        shown = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
        sys.stderr.write(f"step {self._step}  {shown}\n")
        if hosted_by(trainer.module) is None:  # for a trainer class, `LogMetrics` sends them
            log_to_loggers(trainer.lightning, metrics, self._step)


class CheckpointCallback(Checkpoint):
    """Saves checkpoints at a cadence, and keeps the newest and the best; see `Checkpoint`.

    The best has the smallest loss that a step returns or reports, even if nothing logs the loss.

    Args:
        save_interval: Cadence in steps; 0 turns it off.
        save_best: Whether the checkpoint with the smallest loss is kept.
        max_checkpoints: How many of the newest are kept; None keeps all.
        output_dir: Their folder; None is ``<default_root_dir>/checkpoints``.

    Raises:
        ValueError: A number is negative, or `max_checkpoints` is 0.
    """

    def __init__(
        self,
        save_interval: int = 1000,
        *,
        save_best: bool = True,
        max_checkpoints: int | None = 5,
        output_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        is_valid = max_checkpoints is None or max_checkpoints >= 1
        require((is_valid, "max_checkpoints", "a number >= 1", max_checkpoints))
        every_n_steps, monitor = step_cadence("save_interval", save_interval), "loss" if save_best else None
        super().__init__(output_dir, every_n_steps=every_n_steps, keep_last=max_checkpoints, monitor=monitor)

    @override
    def _metrics(self, trainer: pl.Trainer) -> dict[str, float]:
        loss = None if self.retention.monitor is None else view_of(trainer, trainer.lightning_module).loss
        return super()._metrics(trainer) if loss is None else {"loss": loss}


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
        scores = {f"eval/{name}": float(value) for name, value in scores.items()}
        log_to_loggers(trainer.lightning, scores, self._step)


class EarlyStoppingCallback(EarlyStopping):
    """Ends training when the monitored metric no longer improves; see `EarlyStopping`.

    It checks every step; with a trainer class, at the cadence of its metrics.

    Args:
        patience: Steps without an improvement after which training ends.
        min_delta: By how much a value must be smaller than the best one to be an improvement.
        monitor: Name of the metric.

    Raises:
        ValueError: An argument is invalid.
    """

    def __init__(self, patience: int = 5000, *, min_delta: float = 1e-4, monitor: str = "loss") -> None:
        super().__init__(monitor, patience, min_delta=min_delta, check_every=1)


class ProgressCallback(JobProgress):
    """Shows step, loss, speed and remaining time; see `JobProgress`.

    Args:
        desc: Text in front.
    """

    def __init__(self, desc: str = "Training") -> None:
        super().__init__(description=desc)


class _NamesRun(Hook):
    """Gives a run without an id the id `run_id`."""

    run_id: str | None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        state = run_state_of(trainer)
        state.run_id = state.run_id or self.run_id or ""
        super().setup(trainer, pl_module, stage)


class HeartbeatCallback(_NamesRun, Heartbeat):
    """Writes heartbeats of WASR telemetry; see `Heartbeat`.

    Args:
        interval_steps: Cadence in steps; 0 turns it off.
        scenario: Name of the scenario in the events.
        run_id: Id for the run, if it has none.
        metrics_path: The telemetry file; None is ``WORLDFLUX_METRICS_PATH``, or ``.worldflux/metrics.jsonl``.

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
        super().__init__(interval_steps, scenario, path=metrics_path)
        self.run_id = run_id


class DiagnosisCallback(_NamesRun, Diagnosis):
    """Reports when training goes wrong; see `Diagnosis`.

    Args:
        check_interval: Cadence in steps; 0 turns it off.
        gradient_min_norm: Gradients vanish if the largest norm of a parameter's gradient is below this.
        latent_std_min: Latent values have collapsed if their standard deviation is below this.
        scenario: Name of the scenario in the events.
        run_id: Id for the run, if it has none.
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
        super().__init__(check_interval, gradient_min_norm, latent_std_min, scenario=scenario, path=metrics_path)
        self.run_id = run_id


class TrainingReportCallback(NeedsFit):
    """Writes a JSON file when training has ended: steps, losses, times and the configuration, without secrets.

    Args:
        path: The file; None is ``training_report.json`` in the trainer's output folder.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)

    @override
    def on_train_end(self, trainer: TrainerView) -> None:
        report = {
            **{name: getattr(trainer, name) for name in ("run_id", "global_step", "epoch", "train_start_time")},
            **{name: getattr(trainer, name) for name in ("loss", "best_loss", "metrics")},
            **trainer.runtime_profile(),
            "config": without_secrets(vars(trainer.config)),
        }
        # NaN and infinity become null; other values that JSON cannot represent become text.
        encoded = msgspec.json.encode(report, enc_hook=str, order="sorted")
        path = self.path or trainer.output_dir / "training_report.json"
        write_bytes_durably(path, msgspec.json.format(encoded) + b"\n")


class CallbackList(Hook):
    """Calls its callbacks in order; it is a Lightning callback that works in any ``Trainer``.

    Your own loop can call its six methods: each takes your trainer object and passes it to your callbacks, whose
    exceptions reach the loop. Callbacks of this package and of Lightning need a fit.

    Args:
        callbacks: Callbacks of the six-hook style, and Lightning callbacks; all join those of the trainer when a fit
            is set up.
        defaults: Whether to add a `LoggingCallback`, and a `CheckpointCallback` if the trainer has no other checkpoint
            callback.

    Raises:
        TypeError: Something in `callbacks` has none of the six hooks, or is a trainer hook. In your own loop: a
            callback needs a fit.
    """

    critical = True
    ranks = "all"

    def __init__(self, callbacks: Sequence[Callback | pl.Callback] = (), *, defaults: bool = True) -> None:
        self.defaults = defaults
        self.callbacks: list[Any] = []
        self._joined: list[pl.Callback] = []
        self._view: TrainerView | None = None
        for callback in callbacks:
            self.append(callback)

    def append(self, callback: Any) -> None:
        """Add a callback, a `Callback` or one of Lightning's, after the others; during a fit, for the next fit.

        Raises:
            TypeError: It has none of the six hooks, or is a trainer hook.
        """
        if not isinstance(callback, pl.Callback):
            require_events("callback", callback, HOOKS, Callback)
        self.callbacks.append(callback)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        view = self._view = view_of(trainer, pl_module)
        present = [each for each in callbacks_of(trainer) if each not in self._joined]
        trainer.callbacks = present  # type: ignore[attr-defined]
        shows_progress = any(isinstance(each, JobProgress) for each in present)
        self._joined = []
        for place, each in enumerate([*self.callbacks, *self._missing(view)]):
            callback = each if isinstance(each, pl.Callback) else _Adapter(each, place)
            is_second_progress = shows_progress and isinstance(callback, JobProgress)
            if callback not in present and not is_second_progress:
                self._joined.append(callback)
        # This list comes before its callbacks: it updates the `TrainerView` that they read. Checkpoints come last.
        place = present.index(self) + 1
        checkpoints = [each for each in self._joined if isinstance(each, pl.callbacks.Checkpoint)]
        others = [each for each in self._joined if each not in checkpoints]
        trainer.callbacks = [*present[:place], *others, *present[place:], *checkpoints]  # type: ignore[attr-defined]
        order_callbacks(trainer)
        for callback in self._joined:
            callback.setup(trainer, pl_module, stage)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._view is None else {"best_loss": self._view.best_loss}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._view is not None:
            self._view.best_loss = state_dict.get("best_loss", math.inf)

    def _missing(self, view: TrainerView) -> list[Any]:
        """Return the default callbacks that neither this list nor the trainer has."""
        if not self.defaults:
            return []
        logs = any(isinstance(callback, LoggingCallback) for callback in self.callbacks)
        saves = any(isinstance(callback, CheckpointCallback) for callback in self.callbacks)
        return [
            *([] if logs else [LoggingCallback()]),
            *([] if saves or view.checkpoint_callbacks else [CheckpointCallback()]),
        ]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        view = view_of(trainer, pl_module)
        view.step_ended(outputs)
        if view.stop_vote.is_due(trainer):
            view.stop_vote.agree(trainer)

    # Your own loop may call these six hooks. The last two are also events of `Hook`: then they get a module, and do
    # nothing, because the callbacks of this list receive the event themselves.

    def on_train_begin(self, trainer: Any) -> None:
        """Training begins."""
        self._call("on_train_begin", trainer)

    def on_epoch_begin(self, trainer: Any) -> None:
        """An epoch begins."""
        self._call("on_epoch_begin", trainer)

    def on_step_begin(self, trainer: Any) -> None:
        """A step begins."""
        self._call("on_step_begin", trainer)

    def on_step_end(self, trainer: Any) -> None:
        """A step has ended."""
        self._call("on_step_end", trainer)

    @override
    def on_epoch_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            self._call("on_epoch_end", trainer)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            self._call("on_train_end", trainer)

    def _call(self, hook: str, trainer: Any) -> None:
        """Call `hook` of all callbacks, from the user's own loop."""
        for callback in self.callbacks:
            if isinstance(callback, pl.Callback | NeedsFit):
                name = type(callback).__name__
                raise TypeError(
                    f"{name} cannot run in your own loop, only in a fit of Lightning's Trainer. Take it out of the "
                    "CallbackList, or put the loop's step into a trainer class or a LightningModule"
                )
            if hasattr(callback, hook):
                getattr(callback, hook)(trainer)


class _Adapter(StyleAdapter):
    """Calls the six hooks of a callback, under its policy."""

    def __init__(self, callback: Any, place: int) -> None:
        critical = bool(getattr(callback, "critical", False))
        super().__init__(callback, critical=critical, ranks=getattr(callback, "ranks", "zero"))
        self._place = place

    @property
    @override
    def state_key(self) -> str:
        return f"callback {self._place} of the list: {type(self.callback).__qualname__}"

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = getattr(self.callback, "state_dict", dict)()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if hasattr(self.callback, "load_state_dict"):
            self.callback.load_state_dict(state_dict)

    @override
    def argument(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
        return view_of(trainer, pl_module)

    on_train_start = forwarding_hook("on_train_begin")
    on_train_end = forwarding_hook("on_train_end")
    on_train_epoch_start = forwarding_hook("on_epoch_begin")
    on_train_epoch_end = forwarding_hook("on_epoch_end")
    on_train_batch_start = forwarding_hook("on_step_begin")
    on_train_batch_end = forwarding_hook("on_step_end")
