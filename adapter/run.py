"""One attempt of a job, from its settings to its exit code.

From the moment the event log is open every way out leaves exactly one terminal event. Modules that load torch are
imported only once there is something to train.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..callbacks.checkpoint.layout import FINAL_NAME
from ..callbacks.checkpoint.record import RecordMeta
from ..callbacks.stop_signals import StopSignals
from ..reporters.event_log import EventLog
from ..reporters.uploads import TerminalPayload
from .artifact_dirs import prepare_artifact_dirs
from .artifacts_lock import lock_artifacts
from .exceptions import (
    ContractError,
    EventLogError,
    InputError,
    StartupContractError,
    TrainingCanceled,
    UploadError,
)
from .failure_sinks import resolve_failure_sinks
from .failures import EXIT_COMPLETED, EXIT_STARTUP, Failure, describe_failure
from .faults import redact
from .inputs import MaterializedInputs, materialize_inputs
from .loading import find_trainer, make_trainer, on_sys_path
from .resume import Start, decide_start, move_old_artifacts_aside
from .run_config import RunConfig, resolve_run_config
from .run_uploads import open_uploader, queue_record, report_startup_failure, settle

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..reporters.uploads import Uploader
    from .contract import TrainerPlugin
    from .module import ContractModule

__all__ = ["run_job", "run_training_runtime_from_env"]

log = logging.getLogger(__name__)

_USERS_MISTAKES = (StartupContractError, InputError, ContractError, UploadError, TrainingCanceled)
"""Failures whose message says all; a traceback would bury it."""


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to a job."""

    spec_path: Path | None = None
    overrides: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    fresh: bool = False
    """Move artifacts of earlier runs aside and start at step 0."""
    allow_changed: bool = False
    """Resume although the job is not that of the checkpoint."""


@dataclass(frozen=True)
class Completion:
    """How a run that completed ended."""

    step: int
    final_checkpoint: Path | None
    stopped: str | None = None


def run_training_runtime_from_env() -> int:
    """Run the job that the environment describes, and return the exit code."""
    return run_job(RunOptions())


def run_job(options: RunOptions) -> int:
    """Run a job and return the exit code: 0 completed, 1 failed, 2 startup, 75 stopped but resumable."""
    with StopSignals().installed() as signals:
        try:
            config = resolve_run_config(
                spec_path=options.spec_path, overrides=options.overrides, environ=options.environ
            )
            for warning in config.warnings:
                log.warning(warning)
            if not _is_first_rank():
                return _follow(config, options, signals)
            prepare_artifact_dirs(config)
            with lock_artifacts(config), EventLog(config.events_path, run_id=config.run_id) as event_log:
                return _attempt(config, options, signals, event_log)
        except (StartupContractError, EventLogError) as error:
            return _report_startup_failure(options, error)


def _is_first_rank() -> bool:
    """Whether this process is rank 0, as far as a launcher's environment tells before there is a process group."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name]) == 0
    return True


def _attempt(config: RunConfig, options: RunOptions, signals: StopSignals, event_log: EventLog) -> int:
    """Everything after the event log is open; leaves exactly one terminal event.

    It comes last: required uploads settle, the terminal message is acknowledged, then the event says how it ended.
    """
    training = _Training(config, signals, event_log)
    with contextlib.ExitStack() as stack:
        completion: Completion | None = None
        try:
            if options.fresh:
                _start_afresh(config)
            training.uploader = open_uploader(config)
            if training.uploader is not None:
                stack.callback(training.uploader.close)
            completion = training.run(allow_changed=options.allow_changed)
            settle(training.uploader)
            _tell_completed(training.uploader, completion, event_log.attempt)
        except BaseException as error:  # noqa: BLE001 - whatever ends the run, its log ends with a terminal event
            failure = _describe(config, options, event_log, error)
            _log_failure(error, failure, secrets=(config.token,))
            _tell_failed(training, failure, event_log.attempt)
            event_log.failed(
                step=training.failed_step, error=failure.text, category=failure.category, resumable=failure.resumable
            )
            return failure.exit_code
    event_log.completed(step=completion.step, final_checkpoint=completion.final_checkpoint, stopped=completion.stopped)
    _show_results(config, completion)
    return EXIT_COMPLETED


def _start_afresh(config: RunConfig) -> None:
    moved = move_old_artifacts_aside(config)
    if moved is not None:
        log.info("moved earlier artifacts to %s", moved)


def _describe(config: RunConfig, options: RunOptions, event_log: EventLog, error: BaseException) -> Failure:
    return describe_failure(
        error,
        loading=event_log.phase == "new",
        has_checkpoint=any(config.checkpoints_dir.glob("*.json")),
        secrets=(config.token or "",),
        environ=options.environ,
    )


def _tell_completed(uploader: Uploader | None, completion: Completion, attempt: int) -> None:
    """Have the end acknowledged.

    Raises:
        UploadError: It was refused, or not acknowledged by the deadline.
    """
    if uploader is None:
        return
    final = None if completion.final_checkpoint is None else str(completion.final_checkpoint)
    error = uploader.deliver_terminal(TerminalPayload("completed", completion.step, final, attempt=attempt)).error()
    if error is not None:
        raise error


def _tell_failed(training: _Training, failure: Failure, attempt: int) -> None:
    """Deliver what the run has left to deliver, and how it ended; what cannot be delivered stays in the spool."""
    uploader = training.uploader
    if uploader is None:
        return
    if failure.category not in ("upload", "auth"):  # those have waited for the deadline already
        result = uploader.settle(progress=log.info)
        if not result.ok:
            log.error("uploads of the failed run: %s", result.error())
    payload = TerminalPayload("failed", training.failed_step, error=failure.text, attempt=attempt)
    error = uploader.deliver_terminal(payload).error()
    if error is not None:
        log.error("the failure could not be reported: %s", error)


def _follow(config: RunConfig, options: RunOptions, signals: StopSignals) -> int:
    """A rank other than the first: trains along, and leaves every report to rank 0."""
    try:
        _Training(config, signals, None).run(allow_changed=options.allow_changed)
    except TrainingCanceled:
        # A launcher ends the other processes when one leaves with an error, rank 0 while it still reports.
        return EXIT_COMPLETED
    return EXIT_COMPLETED


class _Training:
    """One attempt to train; remembers how far it came, for the report of a failure."""

    def __init__(self, config: RunConfig, signals: StopSignals, event_log: EventLog | None) -> None:
        self.config = config
        self.signals = signals
        self.event_log = event_log
        self.uploader: Uploader | None = None
        self.module: ContractModule | None = None

    @property
    def failed_step(self) -> int:
        return self.module.failed_step if self.module is not None else 0

    def run(self, *, allow_changed: bool) -> Completion:
        config = self.config
        self._raise_if_stopped()
        from_ref = config.inputs.resume_checkpoint_ref is not None
        start = Start() if from_ref else decide_start(config, allow_changed=allow_changed)
        for warning in start.warnings:
            log.warning(warning)
        if start.is_finished:
            return self._already_finished(start)
        inputs = materialize_inputs(config, raise_if_stopped=self._raise_if_stopped)
        if from_ref:
            start = decide_start(config, resume_checkpoint=inputs.resume_checkpoint, allow_changed=allow_changed)
        with on_sys_path([config.spec_dir, Path.cwd()]):
            return self._train(_load_trainer(config), inputs, start)

    def _raise_if_stopped(self) -> None:
        if self.signals.reason is not None:
            raise TrainingCanceled(self.signals.reason)

    def _already_finished(self, start: Start) -> Completion:
        assert start.record is not None
        if self.event_log is not None:
            self.event_log.started()
        if self.uploader is not None:
            queue_record(self.uploader, start.record)
        log.info("run %s has completed before; nothing to train", self.config.run_id)
        return Completion(start.record.step, start.record.path)

    def _train(self, plugin: TrainerPlugin, inputs: MaterializedInputs, start: Start) -> Completion:
        from .assembly import instantiate
        from .module import ContractModule, trainer_directory

        trainer, data = instantiate(self.config, parquet_paths=[str(path) for path in inputs.parquet_paths])
        if data is None and not callable(getattr(plugin, "rollout", None)):
            raise StartupContractError(
                "startup.invalid_job_spec",
                "The job names no data, and its trainer has no `rollout`. Add `dataset.parquet_paths`, "
                "`inputs.dataset_parquet_refs` or `mock_batches`.",
            )
        self.module = ContractModule(plugin, self.config.job, model_handles=inputs.model_handles())
        self._attach(trainer)
        record = start.record
        if record is not None and record.is_old:
            self.module.resume_from(
                step=record.step, payload=record.state, checkpoint_dir=trainer_directory(record.path)
            )
        resumes = record is not None and not record.is_old
        trainer.fit(self.module, datamodule=data, ckpt_path=str(record.path) if record and resumes else None)
        final = self.config.checkpoints_dir / f"{FINAL_NAME}.json"
        return Completion(self.module.completed_steps, final if final.exists() else None, self.module.stopped)

    def _attach(self, trainer: pl.Trainer) -> None:
        """Give the callbacks and loggers that were made from the configuration what lives in this process."""
        from ..callbacks.checkpoint import Checkpoint
        from ..callbacks.hook import callbacks_of, run_state_of
        from ..callbacks.record_events import RecordEvents
        from ..callbacks.stop_requests import StopRequests
        from ..callbacks.upload_artifacts import UploadArtifacts
        from ..reporters.event_logger import EventLogger

        callbacks = callbacks_of(trainer)
        attempt = self.event_log.attempt if self.event_log is not None else 1
        state = run_state_of(trainer)
        state.run_id, state.attempt = self.config.run_id, attempt
        for callback in callbacks:
            if isinstance(callback, StopRequests):
                callback.signals = self.signals
            if isinstance(callback, Checkpoint):
                callback.run = self._record_meta(attempt)
        if self.event_log is not None:
            attached = EventLogger.attached(self.event_log)
            trainer.loggers = [attached if isinstance(own, EventLogger) else own for own in trainer.loggers]
            callbacks.insert(0, RecordEvents(self.event_log))
        if self.uploader is not None:
            callbacks.append(UploadArtifacts(self.uploader))

    def _record_meta(self, attempt: int) -> RecordMeta:
        """What every checkpoint of this run says of it."""
        config = self.config
        return RecordMeta(
            run_id=config.run_id,
            attempt=attempt,
            max_steps=config.job.max_steps,
            spec_digest=config.spec_digest,
            spec=dict(config.spec_fields),
        )


def _load_trainer(config: RunConfig) -> TrainerPlugin:
    """The trainer of the job; what its constructor raises passes as it is.

    Raises:
        StartupContractError: ``startup.invalid_trainer``: it cannot be imported or does not conform.
    """
    try:
        target = find_trainer(config.trainer)
    except Exception as error:
        context = "" if isinstance(error, ContractError) else f"importing {config.trainer!r} raised {_kind(error)}: "
        raise StartupContractError("startup.invalid_trainer", f"{context}{error}") from error
    return make_trainer(target)


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _report_startup_failure(options: RunOptions, error: StartupContractError | EventLogError) -> int:
    """Say why a run could not start, and leave a ``failed`` event where there is a place for it."""
    sinks = resolve_failure_sinks(spec_path=options.spec_path, overrides=options.overrides, environ=options.environ)
    if isinstance(error, EventLogError):
        error = StartupContractError("startup.artifacts_in_use", str(error))
    failure = describe_failure(
        error, loading=True, has_checkpoint=False, secrets=(sinks.token or "",), environ=options.environ
    )
    _log_failure(error, failure, secrets=(sinks.token,))
    report_startup_failure(sinks, failure)
    if sinks.events_path is not None and error.code != "startup.artifacts_in_use":
        try:
            with EventLog(sinks.events_path, run_id=sinks.run_id) as event_log:
                event_log.failed(step=0, error=failure.text, category=failure.category)
        except (OSError, EventLogError) as problem:
            log.error("the failed event was not written to %s: %s", sinks.events_path, problem)  # noqa: TRY400
    return EXIT_STARTUP


def _log_failure(error: BaseException, failure: Failure, *, secrets: Sequence[str | None]) -> None:
    """Say what went wrong, with a traceback where the message alone does not tell."""
    if isinstance(error, TrainingCanceled):
        log.warning("stopped: %s; start the run again with resume_from_latest to go on", error.reason)
        return
    mistake = isinstance(error, _USERS_MISTAKES)
    text = str(error) if mistake else "".join(traceback.format_exception(error)).rstrip()
    log.error("%s failure: %s", failure.category, redact(text, secrets))


def _show_results(config: RunConfig, completion: Completion) -> None:
    """Say where everything is."""
    places = {
        "final checkpoint": completion.final_checkpoint,
        "checkpoints": config.checkpoints_dir,
        "samples": config.samples_dir,
        "events": config.events_path,
    }
    ended = f"completed at step {completion.step}" + (f" ({completion.stopped})" if completion.stopped else "")
    lines = [f"run {config.run_id} {ended}"]
    lines += [f"  {name:<17} {_shown(path)}" for name, path in places.items() if path is not None and path.exists()]
    sys.stderr.write("\n".join(lines) + "\n")


def _shown(path: Path) -> str:
    """A path as one would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
