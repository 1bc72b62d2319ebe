"""One attempt of a job, from its settings to its exit code.

From the moment the event log is open every way out leaves exactly one terminal event. Modules that load torch are
imported only once there is something to train.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...callbacks.checkpoint.format.layout import FINAL_NAME
from ...callbacks.checkpoint.format.record import RecordMeta, read_record
from ...callbacks.checkpoint.storage.commit import sweep
from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import Deadline, cancel_file_is_set, process_age_s
from ...reporters.events.event_log import EventLog
from ..contract.exceptions import (
    BrokenCheckpointError,
    ContractError,
    EventLogError,
    FailureCategory,
    RankFailed,
    StartupContractError,
    TrainingCanceled,
)
from ..contract.types import JobLifecycleClient
from ..inputs import MaterializedInputs, materialize_inputs
from ..inputs.progress_display import shown_progress
from ..job.config import RunConfig, resolve_run_config
from ..job.identity import sealed_fields
from ..job.parser_errors import is_about_what_was_given
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path, optional_hook
from ..plumbing.failures import EXIT_COMPLETED, EXIT_FAILED, EXIT_STARTUP, describe_failure
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.redaction import text_of, traceback_of
from .artifact_dirs import prepare_artifact_dirs
from .artifacts_lock import lock_artifacts
from .control_plane import LifecycleSession
from .outcome import Completion, Ending, log_failure
from .ranks.child_processes import RankProcesses
from .ranks.failure_notes import RankFailures, watch_ranks
from .ranks.paused_ranks import watching_paused_ranks
from .ranks.rank_zero_watch import first_rank_announced, first_rank_is_gone, first_rank_process, watch_first_rank
from .ranks.rendezvous_watch import watching_meeting
from .resume import Start, decide_start, move_old_artifacts_aside
from .startup_failure import resolve_failure_sinks
from .uploads import open_uploader, queue_record, report_startup_failure

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..contract.run_state import RunState
    from ..contract.types import TrainerPlugin
    from ..module.module import ContractModule

__all__ = ["run_job", "run_training_runtime_from_env"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to a job."""

    spec_path: str | os.PathLike[str] | None = None
    overrides: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    fresh: bool = False
    """Move artifacts of earlier runs aside and start at step 0."""
    allow_changed: bool = False
    """Resume although the job is not that of the checkpoint."""
    lifecycle: JobLifecycleClient | None = None
    """The control plane that hands out runs: it is claimed there, kept alive, and reported. No setting makes one."""
    heartbeat_s: float | None = None
    """Seconds between heartbeats to that control plane; None means 5."""


def run_training_runtime_from_env() -> int:
    """Run the job that the environment describes, and return the exit code.

    The function of this name that `gen_worker.trainer` gives raises what ended the run instead.
    """
    return run_job(RunOptions())


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended."""

    exit_code: int
    error: BaseException | None = None
    """What ended it, where it did not complete; it has been reported."""


def run_job(options: RunOptions) -> int:
    """Run a job and return the exit code: 0 completed, 1 failed, 2 startup, 75 stopped but resumable."""
    return attempt_job(options).exit_code


def attempt_job(options: RunOptions) -> Attempt:
    """Run a job, report how it ended, and tell the caller too."""
    with StopSignals().installed() as signals:
        try:
            config = resolve_run_config(
                spec_path=options.spec_path, overrides=options.overrides, environ=options.environ
            )
            with redacted_logs(config.secrets, options.environ):
                return _run(config, options, signals)
        except Exception as error:  # noqa: BLE001 - whatever keeps a run from starting is reported
            return Attempt(_report_startup_failure(options, error), error)


def _run(config: RunConfig, options: RunOptions, signals: StopSignals) -> Attempt:
    for warning in config.warnings:
        log.warning(warning)
    if not _is_first_rank():
        return _follow(config, options, signals)
    prepare_artifact_dirs(config)
    with lock_artifacts(config):
        return _owning(_open_event_log(config), config, options, signals)


def _owning(event_log: EventLog, config: RunConfig, options: RunOptions, signals: StopSignals) -> Attempt:
    """An attempt that owns its log: whatever goes wrong from here on is no failed start, and is not reported as one."""
    try:
        attempt = _attempt(config, options, signals, event_log)
    except BaseException as error:  # noqa: BLE001 - nobody else may report this attempt
        log.error("the end of the run could not be reported: %s", traceback_of(error))  # noqa: TRY400
        attempt = Attempt(EXIT_FAILED, error)
        if event_log.phase != "ended":
            _leave_a_last_word(event_log)
    try:
        event_log.close()
    except EventLogError as error:
        log.error("the event log may not be durable: %s", error)  # noqa: TRY400
        return Attempt(attempt.exit_code or EXIT_FAILED, attempt.error or error)
    return attempt


def _leave_a_last_word(event_log: EventLog) -> None:
    try:
        event_log.failed(step=0, error="the end of the run could not be reported", category="train-step")
    except EventLogError as error:
        log.error("the failure could not be recorded: %s", error)  # noqa: TRY400


def _open_event_log(config: RunConfig) -> EventLog:
    try:
        return EventLog(config.events_path, run_id=config.run_id)
    except EventLogError as error:
        raise StartupContractError("startup.artifacts_in_use", str(error)) from error


def _rank() -> int:
    """The rank of this process, as far as a launcher's environment tells before there is a process group."""
    # NODE_RANK counts only where nothing tells the rank among all: its node's first process is not rank 0.
    for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK"):
        number = os.environ.get(name, "")
        if number.isdigit() and (int(number) or name not in ("NODE_RANK", "GROUP_RANK")):
            return int(number)
    return 0


def _is_first_rank() -> bool:
    return _rank() == 0


def _attempt(config: RunConfig, options: RunOptions, signals: StopSignals, event_log: EventLog) -> Attempt:
    """Everything after the event log is open; leaves exactly one terminal event."""
    ranks = RankFailures(config.artifacts_dir, expects_ranks=False)
    ranks.forget_earlier(time.time() - process_age_s())
    ending = Ending(config, event_log, signals, ranks, options.environ)
    training = _Training(config, signals, ending, ending.fail_and_exit)
    training.checks.append(ranks.stop_reason)
    ending.failed_step, ending.stage = lambda: training.failed_step, lambda: training.stage
    ending.raise_if_stopped = training.raise_if_stopped
    with contextlib.ExitStack() as stack:
        try:
            if options.lifecycle is not None:
                session = LifecycleSession(
                    options.lifecycle,
                    config.run_id,
                    interval_s=options.heartbeat_s,
                    answer_s=config.upload_deadline_s,
                    raise_if_stopped=training.raise_if_stopped,
                )
                ending.lifecycle = stack.enter_context(session)
                training.checks.append(ending.lifecycle.reason)
            if options.fresh:
                _start_afresh(config)
            ending.uploader = open_uploader(config)
            if ending.uploader is not None:
                stack.callback(ending.uploader.close)
            completion = training.run(allow_changed=options.allow_changed)
            code = ending.complete(completion)
        except BaseException as error:  # noqa: BLE001 - whatever ends the run, its log ends with a terminal event
            return Attempt(ending.fail(error), ending.cause or error)
    _show_results(config, completion)
    return Attempt(code)


def _start_afresh(config: RunConfig) -> None:
    moved = move_old_artifacts_aside(config)
    if moved is not None:
        log.info("moved earlier artifacts to %s", moved)


def _follow(config: RunConfig, options: RunOptions, signals: StopSignals) -> Attempt:
    """A rank other than the first: trains along, and leaves every report to rank 0."""

    def end_now(error: Exception) -> None:
        code = _tell_first_rank(config, options, training.stage, error)
        os._exit(EXIT_COMPLETED if isinstance(error, TrainingCanceled) else code)

    training = _Training(config, signals, None, end_now)

    def leave(error: RankFailed) -> None:
        log.error("%s, so this rank ends as well", error)
        os._exit(EXIT_FAILED)

    stop_watch = watch_first_rank(config.artifacts_dir, lambda: os._exit(EXIT_FAILED))
    try:
        with watching_paused_ranks(first_rank_process, training.is_stopping, leave):
            training.run(allow_changed=options.allow_changed)
    except TrainingCanceled as error:
        if not training.stop_is_agreed:
            _tell_first_rank(config, options, training.stage, error)
        # A launcher ends the other processes when one leaves with an error, rank 0 while it still reports.
        return Attempt(EXIT_COMPLETED)
    except BaseException as error:  # noqa: BLE001 - rank 0 reports it
        return Attempt(_tell_first_rank(config, options, training.stage, error), error)
    finally:
        stop_watch()
    return Attempt(EXIT_COMPLETED)


def _tell_first_rank(config: RunConfig, options: RunOptions, stage: FailureCategory, error: BaseException) -> int:
    """Leave a note of what ended this rank, and stay until it was read: a launcher ends the rest when one leaves."""
    failure = describe_failure(
        error, stage=stage, has_checkpoint=False, secrets=config.secrets, environ=options.environ
    )
    log_failure(error, failure, secrets=config.secrets, environ=options.environ)
    if first_rank_is_gone():  # The next attempt must not take this for a failure of its own.
        return failure.exit_code
    ranks = RankFailures(config.artifacts_dir, expects_ranks=True)
    ranks.note(_rank(), failure)
    ranks.wait_until_reported()
    return failure.exit_code


class _Training:
    """One attempt to train; remembers how far it came, for the report of a failure."""

    def __init__(
        self,
        config: RunConfig,
        signals: StopSignals,
        ending: Ending | None,
        end_now: Callable[[Exception], None],
    ) -> None:
        self.config = config
        self.end_now = end_now
        """Reports a failure from a thread that watches the training, and ends the process."""
        self.signals = signals
        self.ending = ending
        self.module: ContractModule | None = None
        self.checks: list[Callable[[], str | None]] = []
        """Further sources of a stop; each returns a reason, or None."""
        self.state: RunState | None = None
        self._stage: FailureCategory = "model-load"
        self._deadline = Deadline(config.max_runtime_s)

    @property
    def failed_step(self) -> int:
        return self.module.failed_step if self.module is not None else 0

    @property
    def stop_is_agreed(self) -> bool:
        """Whether the ranks stop together, so that none has to be told."""
        return self.state is not None and self.state.stop_reason is not None

    @property
    def stage(self) -> FailureCategory:
        """What is going on, for a failure that tells nothing by its type."""
        has_started = self.failed_step > 0 if self.ending is None else self.ending.event_log.phase != "new"
        return "train-step" if has_started else self._stage

    def run(self, *, allow_changed: bool) -> Completion:
        config = self.config
        self._raise_if_signalled()
        from_ref = config.inputs.resume_checkpoint_ref is not None
        self._stage = "input"
        start = Start() if from_ref else decide_start(config, allow_changed=allow_changed)
        for warning in start.warnings:
            log.warning(warning)
        if start.is_finished:
            return self._already_finished(start)
        self.raise_if_stopped()
        with shown_progress() as progress:
            inputs = materialize_inputs(config, progress=progress, raise_if_stopped=self.raise_if_stopped)
        if from_ref:
            start = decide_start(config, resume_checkpoint=inputs.resume_checkpoint, allow_changed=allow_changed)
        if start.record is not None and self.ending is not None:
            place = _shown(start.record.path)
            log.info("going on after step %d of %d, from %s", start.record.step, config.job.max_steps, place)
        self._stage = "model-load"
        with on_sys_path([config.spec_dir, Path.cwd()]):
            return self._train(_load_trainer(config), inputs, start)

    def _raise_if_signalled(self) -> None:
        if self.signals.reason is not None:
            raise TrainingCanceled(self.signals.reason)

    def raise_if_stopped(self) -> None:
        """Before there are callbacks that watch, as while inputs are fetched."""
        self._raise_if_signalled()
        config = self.config
        if config.canceled or (config.cancel_file is not None and cancel_file_is_set(config.cancel_file)):
            raise TrainingCanceled("canceled")
        if self._deadline.is_over(time.monotonic()):
            raise TrainingCanceled("timeout")
        for check in self.checks:
            reason = check()
            if reason is not None:
                raise TrainingCanceled(reason)

    def _already_finished(self, start: Start) -> Completion:
        assert start.record is not None
        if self.ending is not None:
            sweep(self.config.checkpoints_dir)  # A kill may have come after the last commit.
            self.ending.event_log.started()
            if self.ending.uploader is not None:
                queue_record(self.ending.uploader, start.record)
        log.info("run %s has completed before; nothing to train", self.config.run_id)
        return Completion(start.finished_step, _reported_final(self.config))

    def _train(self, plugin: TrainerPlugin, inputs: MaterializedInputs, start: Start) -> Completion:
        from ..job.lightning_config import instantiate
        from ..module.module import ContractModule
        from ..module.trainer_files import trainer_directory

        trainer, data = instantiate(self.config, parquet_paths=[str(path) for path in inputs.parquet_paths])
        if data is None and optional_hook(plugin, "rollout") is None:
            raise StartupContractError(
                "startup.invalid_job_spec",
                "The job names no data, and its trainer has no `rollout`. Add `dataset.parquet_paths`, "
                "`inputs.dataset_parquet_refs` or `mock_batches`.",
            )
        self.module = ContractModule(plugin, self.config.job, model_handles=inputs.model_handles())
        self._attach(trainer)
        record = start.record
        if record is not None and record.is_old:
            folder = trainer_directory(record.path, plugin)
            self.module.resume_from(step=record.step, payload=record.state, checkpoint_dir=folder)
        resumes = record is not None and not record.is_old
        with self._watching_ranks(trainer), watching_meeting(trainer, self.raise_if_stopped, self.end_now):
            self._fit(trainer, self.module, data, ckpt_path=str(record.path) if record and resumes else None)
        return Completion(self.module.completed_steps, _reported_final(self.config), self.module.stopped)

    def _fit(
        self, trainer: pl.Trainer, module: ContractModule, data: pl.LightningDataModule | None, *, ckpt_path: str | None
    ) -> None:
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        try:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        except (ValueError, MisconfigurationException) as error:
            if self.stage == "train-step" or not is_about_what_was_given(error, by=("lightning.",)):
                raise
            text = f"The `lightning` block of the job cannot be used: {text_of(error).strip()}"
            raise StartupContractError("startup.invalid_job_spec", text) from error
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # Lightning makes one of the other
                raise TrainingCanceled("canceled") from error.__context__
            raise

    @contextlib.contextmanager
    def _watching_ranks(self, trainer: pl.Trainer) -> Iterator[None]:
        """End the run when another rank fails, also while this one hangs in a collective."""
        if self.ending is None or trainer.world_size == 1:
            yield
            return
        ranks = self.ending.rank_failures
        ranks.expects_ranks = True
        children = RankProcesses(trainer)
        ranks.children = children
        self.ending.end_ranks = children.kill
        self.signals.before_exit = children.kill_at_once
        stop = watch_ranks(ranks, self.ending.fail_and_exit)
        try:
            with first_rank_announced(), watching_paused_ranks(children.ids, self.is_stopping, self.end_now):
                yield
        finally:
            stop()
            self.signals.before_exit = lambda: None

    def is_stopping(self) -> bool:
        """Whether this rank or another one was told to stop."""
        try:
            self.raise_if_stopped()
        except TrainingCanceled:
            return True
        return self.stop_is_agreed

    def _attach(self, trainer: pl.Trainer) -> None:
        """Give the callbacks and loggers that were made from the configuration what lives in this process."""
        from ...callbacks.checkpoint import Checkpoint
        from ...callbacks.hook.events import callbacks_of, run_state_of
        from ...callbacks.record_events import RecordEvents
        from ...callbacks.stop.stop_requests import StopRequests
        from ...callbacks.upload_artifacts import UploadArtifacts
        from ...callbacks.watch_hangs import WatchHangs
        from ...reporters.events.event_logger import EventLogger

        callbacks = callbacks_of(trainer)
        attempt = self.ending.event_log.attempt if self.ending is not None else 1
        state = self.state = run_state_of(trainer)
        state.run_id, state.attempt = self.config.run_id, attempt
        for callback in callbacks:
            if isinstance(callback, StopRequests):
                callback.signals = self.signals
                for check in self.checks:
                    callback.add_check(check)
            if isinstance(callback, Checkpoint):
                callback.run = self._record_meta(attempt)
                callback.replace_existing = True  # `decide_start` has looked already.
            if isinstance(callback, WatchHangs):
                callback.on_hang = self.end_now
        if self.ending is None:
            return
        attached = EventLogger.attached(self.ending.event_log)
        trainer.loggers = [attached if isinstance(own, EventLogger) else own for own in trainer.loggers]
        callbacks.insert(0, RecordEvents(self.ending.event_log))
        if self.ending.uploader is not None:
            callbacks.append(UploadArtifacts(self.ending.uploader))

    def _record_meta(self, attempt: int) -> RecordMeta:
        """What every checkpoint of this run says of it."""
        config = self.config
        return RecordMeta(
            run_id=config.run_id,
            attempt=attempt,
            max_steps=config.job.max_steps,
            spec_digest=config.spec_digest,
            spec=sealed_fields(config.spec_fields),
        )


def _reported_final(config: RunConfig) -> Path | None:
    """What stands for the final checkpoint in reports: what the trainer's hook named, else the record."""
    final = config.checkpoints_dir / f"{FINAL_NAME}.json"
    try:
        named = read_record(final).primary_path
    except FileNotFoundError:
        return None
    except BrokenCheckpointError:  # of an earlier run, where this one saves none
        return final
    return named if named is not None and named.exists() else final


def _load_trainer(config: RunConfig) -> TrainerPlugin:
    """The trainer of the job; what its constructor raises passes as it is.

    Raises:
        StartupContractError: ``startup.invalid_trainer``: it cannot be imported or does not conform.
    """
    try:
        target = find_trainer(config.trainer)
    except (Exception, SystemExit) as error:
        context = "" if isinstance(error, ContractError) else f"importing {config.trainer!r} raised {_kind(error)}: "
        raise StartupContractError("startup.invalid_trainer", f"{context}{text_of(error)}") from error
    return make_trainer(target)


def _kind(error: BaseException) -> str:
    return type(error).__name__


def _report_startup_failure(options: RunOptions, error: Exception) -> int:
    """Say why a run could not start, and leave a ``failed`` event where there is a place for it."""
    sinks = resolve_failure_sinks(spec_path=options.spec_path, overrides=options.overrides, environ=options.environ)
    failure = describe_failure(
        error, stage="startup", has_checkpoint=False, secrets=sinks.secrets, environ=options.environ
    )
    log_failure(error, failure, secrets=sinks.secrets, environ=options.environ)
    if not _is_first_rank():
        return EXIT_STARTUP
    report_startup_failure(sinks, failure)
    in_use = isinstance(error, StartupContractError) and error.code == "startup.artifacts_in_use"
    if sinks.events_path is not None and not in_use:
        try:
            with EventLog(sinks.events_path, run_id=sinks.run_id) as event_log:
                event_log.failed(step=0, error=failure.text, category=failure.category)
        except (OSError, EventLogError, ValueError) as problem:
            log.error("the failed event was not written to %s: %s", sinks.events_path, problem)  # noqa: TRY400
    return EXIT_STARTUP


def _show_results(config: RunConfig, completion: Completion) -> None:
    """Say where everything is."""
    has_samples = any(config.samples_dir.iterdir())
    places = {
        "final checkpoint": completion.final_checkpoint,
        "checkpoints": config.checkpoints_dir,
        "samples": config.samples_dir if has_samples else None,
        "events": config.events_path,
    }
    ended = f"completed at step {completion.step}" + (f" ({completion.stopped})" if completion.stopped else "")
    lines = [f"run {config.run_id} {ended}"]
    lines += [f"  {name:<17} {_shown(path)}" for name, path in places.items() if path is not None and path.exists()]
    with contextlib.suppress(OSError):  # it has completed, also where nobody reads that
        sys.stderr.write("\n".join(lines) + "\n")


def _shown(path: Path) -> str:
    """A path as one would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
