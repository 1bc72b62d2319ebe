"""The event log as a Lightning logger."""

from __future__ import annotations

import logging
import math
import os
import sys
import uuid
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch.nn import Module
from typing_extensions import override

from ...adapter.contract.exceptions import EventLogError
from ...adapter.plumbing.failures import describe_failure
from ...adapter.plumbing.redaction import secrets_of_module
from .event import RESUMED_METRIC
from .event_log import EventLog, checked_text, float_of
from .reader import starts_of
from .run_metadata import changed_numerics, metadata_of_module, numerics

log = logging.getLogger(__name__)

_FLUSH_STATUS = "finished"
"""Status with which Lightning calls `finalize` in a signal handler, to flush its loggers; training then continues."""


class EventLogger(Logger):
    """Writes the events of a ``Trainer`` as ``trainer_event.v1``, on rank 0.

    Works in any ``Trainer(logger=…)`` and LightningCLI YAML, with any LightningModule:

    - ``started`` when a fit begins, and ``trainer/resumed_from_step`` if it does not begin at step 0;
    - ``metric`` for every number that is logged, at the step that every logger gets (Lightning's own loop counts the
      first batch as step 0). Texts are skipped. The automatic column ``epoch`` is skipped too: it is not a measurement,
      and would double the log of a model with one metric;
    - ``checkpoint`` and ``sample`` for the durable files of genlight's `Checkpoint` and `WriteSamples`.
      Lightning's own ``ModelCheckpoint`` has no events, because its files are not made durable. Metrics that arrive for
      a step whose checkpoint was already reported are dropped with a warning;
    - ``completed`` or ``failed`` when the fit ends, with the number of completed optimizer steps; for ``genlight fit``,
      after its uploads.

    Each fit is one attempt of the run. Each ``validate`` or ``test`` is a separate attempt, which names its ``stage``
    so that readers do not take it for one that trains these steps again.

    Args:
        path: The log. Lightning saves checkpoints next to it.
        run_id: The run; pass the same id again to continue that run. None makes a new id.

    Raises:
        TypeError: `run_id` is not a string.
        ValueError: `run_id` is empty.
        EventLogError: Raised when the fit begins: another process writes the log, or it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str] = "events.jsonl", *, run_id: str | None = None) -> None:
        super().__init__()
        self.run_id = uuid.uuid4().hex if run_id is None else checked_text("run_id", run_id)
        self.path = Path(path)
        self._log: EventLog | None = None
        self._owns_log = self._ends_log = True
        self._trainer: pl.Trainer | None = None
        self._recorder: RecordEvents | None = None
        self._last_step = 0
        self._stage: str | None = None
        """``validate`` or ``test`` if the trainer runs that and not a fit."""
        self._skipped: set[str] = set()

    def join_run(self, run: _HasEventLog) -> None:
        """Add metrics to the log of `run`. If it has none yet, as in ``genlight fit``, it takes over this logger's log.

        A run has one log. A logger with another file keeps its own log and writes the terminal event there.
        """
        if not run.is_rank_zero:  # Lightning does not know the rank before it has started the other processes
            return
        if run.event_log is None:
            run.event_log, self._ends_log = self.experiment, False
        elif run.event_log.path.absolute() == self.path.absolute():
            self.attach(run.event_log)

    def attach(self, event_log: EventLog) -> None:
        """Add metrics to a log that another part of the program opened. That part also writes its terminal event.

        `RecordEvents` writes the events of the fit.
        """
        self.run_id, self.path = event_log.run_id, event_log.path.absolute()
        self._log, self._owns_log, self._ends_log = event_log, False, False

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a logger that opened its log opens it again at its first use. A session's log is closed in a copy.
        own_log, owns = None if self._owns_log else self._log, self._owns_log
        return {**vars(self), "_log": own_log, "_ends_log": owns, "_trainer": None, "_recorder": None}

    @property
    @override
    def name(self) -> str:
        return "genlight"

    @property
    @override
    def version(self) -> str:
        return self.run_id

    @property
    @override
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    @rank_zero_experiment
    def experiment(self) -> EventLog:
        """The event log, opened at the first use."""
        if self._log is None:
            self._log = EventLog(self.path, run_id=self.run_id)
        return self._log

    @override
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the format has no event for hyperparameters."""

    @override
    @rank_zero_only
    def log_graph(self, model: Module, input_array: Any = None) -> None:
        """Begin the attempt: Lightning calls this with its module once everything is set up."""
        if not self._owns_log or not isinstance(model, pl.LightningModule):
            return
        stage = model.trainer.state.fn
        self._stage = None if stage is None or stage == "fit" else stage.value
        if stage == "fit":
            self._trainer = model.trainer
            self._recorder = RecordEvents(self._started_log())
            self._trainer.callbacks.append(self._recorder)  # type: ignore[attr-defined]
        elif stage in ("validate", "test"):  # the first metric comes only at the end
            self._started_log()

    @override
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if getattr(rank_zero_only, "rank", 0):  # like the decorator, but without another call in each step
            return
        at = self._completed_steps() if step is None else step
        # Save a call: once a step was logged, the attempt has begun.
        event_log = (self._last_step and self._log) or self._started_log()
        self._last_step = max(self._last_step, at)
        values = metrics
        if "epoch" in metrics:  # the column that Lightning adds
            values = {name: value for name, value in metrics.items() if name != "epoch"}
        try:
            event_log.metrics(values, step=at)
        except TypeError:
            # Other loggers accept texts, and a trainer may have several loggers.
            numbers = {name: value for name, value in values.items() if _is_number(name, value)}
            if len(numbers) == len(values):
                raise
            self._warn_of([name for name in values if name not in numbers], "they are not numbers")
            if numbers:
                self.log_metrics(numbers, at)
        except EventLogError:
            # Checked only now, because another thread may have reported the checkpoint during the write.
            if event_log.takes_metrics_of(at):
                raise
            why = (
                f"a checkpoint of step {at} was already reported; log them before it, at the number of completed steps"
            )
            self._warn_of(values, why)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        event_log = self._log
        if event_log is None or not self._ends_log or status == _FLUSH_STATUS:
            return
        try:
            if status != "success":
                self._fail(event_log, sys.exception() or RuntimeError("the run was aborted"))
            elif event_log.phase == "started":
                stopped = "should_stop" if self._trainer is not None and self._trainer.should_stop else None
                final = event_log.last_checkpoint
                event_log.completed(step=self._completed_steps(), final_checkpoint=final, stopped=stopped)
        finally:
            event_log.close()
            if self._trainer is not None and self._recorder in self._trainer.callbacks:  # type: ignore[attr-defined]
                self._trainer.callbacks.remove(self._recorder)  # type: ignore[attr-defined]
            self._log = self._trainer = self._recorder = self._stage = None  # ready for the next attempt
            self._last_step = 0

    def _started_log(self) -> EventLog:
        """Return the log, after its ``started`` event if this logger writes that."""
        event_log: EventLog = self._log or self.experiment
        if self._owns_log and event_log.phase == "new":
            module = None if self._trainer is None else self._trainer.lightning_module
            about: dict[str, Any] = {} if self._stage is None else {"stage": self._stage}
            if self._trainer is not None:
                about = _metadata_of_fit(self._trainer)
            event_log.started(metadata={**metadata_of_module(module), **about})
        return event_log

    def _warn_of(self, names: Iterable[str], why: str) -> None:
        """Warn about skipped metrics, once for each name."""
        new = [name for name in names if name not in self._skipped]
        if new:
            self._skipped.update(new)
            log.warning("metrics %s are not written to %s: %s", ", ".join(new), self.path, why)

    def _completed_steps(self) -> int:
        return self._last_step if self._trainer is None else self._trainer.global_step

    def _fail(self, event_log: EventLog, error: BaseException) -> None:
        """Write the terminal event of a failed attempt, unless there is one."""
        if event_log.phase == "ended":
            return
        step = self._completed_steps()
        secrets = secrets_of_module(None if self._trainer is None else self._trainer.lightning_module)
        has_checkpoint = event_log.last_checkpoint is not None or (
            self._trainer is not None and has_stock_checkpoint(self._trainer)
        )
        failure = describe_failure(error, has_checkpoint=has_checkpoint, lost_steps=step > 0, secrets=secrets)
        event_log.record_failure(failure, step)


class _HasEventLog(Protocol):
    """The attributes of a run that the logger uses."""

    event_log: EventLog | None
    """The log of the run's attempt, open, on rank zero."""
    is_rank_zero: bool


def last_step(trainer: pl.Trainer) -> int | None:
    """Return the last step of a fit, by ``max_steps`` and the length of its data; None if neither is known.

    Data without a length counts as data without an end.
    """
    limit = trainer.max_steps if trainer.max_steps > 0 else None
    if trainer.max_epochs == -1:
        return limit
    module = trainer.lightning_module
    if trainer.train_dataloader is None:  # the data is not set up yet
        return None
    if not module.automatic_optimization and not hasattr(module, "plugin"):
        return limit  # with manual optimization a batch may have any number of steps
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 <= steps < math.inf else None


def _metadata_of_fit(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the keys of ``started`` that only a fit knows: its size and the settings that affect its numbers."""
    last = last_step(trainer)
    extent = {"ranks": trainer.world_size, **({} if last is None else {"last_step": last})}
    return {**extent, "numerics": numerics()}


def _warn_of_other_numerics(event_log: EventLog) -> None:
    before, *now = [start.metadata for start in starts_of(event_log.path, event_log.run_id)[-2:]]
    if now and before and now[0] and (changed := changed_numerics(before, now[0])):
        text = "The resumed run may not have the same numbers as an uninterrupted one. Since the previous attempt: %s"
        log.warning(text, "; ".join(changed))


class RecordEvents(Callback):
    """Writes ``started``, ``checkpoint``, ``sample`` and ``finding`` events of a fit to an open log, on rank zero.

    Metrics come from an `EventLogger` of the same log. The session of ``genlight run`` or ``genlight fit`` writes the
    terminal event; without a session, the `EventLogger` that opened the log does. This callback should be the first of
    a trainer, so that ``started`` comes before anything that another callback logs.

    Args:
        event_log: An open log.
        metadata: The origin of the attempt for ``started``; the number of ranks, `last_step` and `numerics` are added.
    """

    def __init__(self, event_log: EventLog, metadata: Mapping[str, Any] | None = None) -> None:
        self.event_log = event_log
        self.metadata = metadata

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.event_log.phase == "new":
            self.event_log.started(metadata={**(self.metadata or {}), **_metadata_of_fit(trainer)})
        if trainer.global_step:  # known only now: loggers are called before Lightning restores the step
            _warn_of_other_numerics(self.event_log)
            self.event_log.metric(name=RESUMED_METRIC, value=trainer.global_step, step=trainer.global_step)

    # Methods that genlight's own callbacks call on every callback that has them.

    def on_checkpoint_durable(self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: Any) -> None:
        """Write the event of a checkpoint that is now durable."""
        self.event_log.checkpoint(path=record.reported_path, step=record.step)

    def on_checkpoint_budget(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, level: Literal["ok", "warn"], text: str
    ) -> None:
        """Write the new time between checkpoints, and whether it keeps the budget."""
        self.event_log.finding(kind="checkpoint_budget", level=level, step=trainer.global_step, text=text)

    def on_resume_proof(self, trainer: pl.Trainer, pl_module: pl.LightningModule, proof: Any) -> None:
        """Write the result of a comparison of repeated steps."""
        is_equal = proof.difference is None
        self.event_log.finding(
            kind="resume_proof", level="ok" if is_equal else "warn", step=proof.step, text=proof.text
        )

    def on_samples_written(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, samples: Mapping[Path, Sequence[Path]], step: int
    ) -> None:
        """Write the events of samples that are now on disk."""
        for record, files in samples.items():
            for path in (record, *files):
                self.event_log.sample(path=path, step=step)


def has_stock_checkpoint(trainer: pl.Trainer) -> bool:
    """Return whether a restart finds a checkpoint of `ModelCheckpoint`, or the one from which this attempt started."""
    stock = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return trainer.ckpt_path is not None or any(each.last_model_path or each.best_model_path for each in stock)


def _is_number(name: Any, value: Any) -> bool:
    try:
        float_of(name, value)
    except TypeError:
        return not isinstance(name, str)  # if the name is not a string, the log refuses it
    return True
