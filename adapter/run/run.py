"""Run one attempt of a job, from its settings to its exit code.

Once the event log is open, every way out leaves exactly one terminal event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources
from ...reporters.events.event_log import EventLog
from ...reporters.uploads import Uploader
from ...reporters.uploads.queue import read_entries
from ..cluster.job_context import is_rank_zero
from ..contract.exceptions import (
    EventLogError,
    GenlightError,
    InputError,
    StartupContractError,
    StopReason,
    UploadError,
)
from ..contract.types import JobLifecycleClient
from ..job.config import UNKNOWN_RUN_ID, RunConfig, read_run_config
from ..job.sources import JOB_VARIABLE
from ..plumbing.failures import failure_category
from ..plumbing.imports import require_linux
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.settings import is_true
from .attempts import has_trained
from .control_plane import Lease
from .deaths import forget_beginning, forget_deaths
from .folder import lock_artifacts, prepare_artifact_dirs, untrusted_dirs
from .ranks import agent_check
from .report import show_results
from .session import Completion, FollowerSession, Session
from .start import move_old_artifacts_aside
from .training import train

require_linux(__name__)

log = logging.getLogger(__name__)

CANCEL_VARIABLE = "TRAINER_CANCELLED"
STARTUP_DEADLINE_S = 10.0
"""Seconds for which a run that cannot start tries to report that."""


@dataclass(frozen=True)
class RunOptions:
    """The options of a start: the job, and how to run it."""

    spec_path: str | os.PathLike[str] | None = None
    overrides: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    fresh: bool = False
    """Move artifacts of earlier runs aside and start at step 0."""
    allow_changed: bool = False
    """Resume although the job differs from the checkpoint's."""
    began_with_process: bool = False
    """Whether the process exists only for this run, as on the command line: a time limit counts from its start, and its
    handler of stop signals stays in use. Otherwise the time counts from the call."""
    age_s: float | None = None
    """Seconds since the run began, if it began before this process and before the call."""
    stop_check: Callable[[], StopReason | None] | None = None
    """Called between steps; the run stops, after a checkpoint, once it returns a reason."""
    is_supervised: bool = False
    """Whether `genlight run --restarts` has started this process as a rank."""
    lifecycle: JobLifecycleClient | None = None
    """Control plane that hands out runs and gets claim, heartbeats and outcome. No setting of a job creates one."""


def run_training_runtime_from_env() -> int:
    """Run the job that the environment describes, and return the exit code.

    The function of this name in `gen_worker.trainer` raises the error that ended the run instead.
    """
    return run_job(RunOptions())


def run_job(options: RunOptions) -> int:
    """Run a job and return the exit code.

    0 completed, 1 failed, 2 startup, 3 ended by `on_nonfinite`, 75 stopped but resumable.
    """
    return attempt_job(options)[0]


def attempt_job(options: RunOptions) -> tuple[int, BaseException | None]:
    """Run a job and report how it ended. Return the exit code, and the reported error if it did not complete."""
    with contextlib.ExitStack() as held:
        handling = StopSignals.handling() if options.began_with_process else None
        signals = handling or held.enter_context(StopSignals().installed())
        signals.say("the run stops before it trains" if is_rank_zero() else "")
        config, errors = read_run_config(
            spec_path=options.spec_path, overrides=options.overrides, environ=options.environ
        )
        held.enter_context(redacted_logs(config.secrets, options.environ))
        session = held.enter_context(_session(config, options, signals))
        try:  # the log gets its terminal event, whatever ends the run
            if (faulty := errors.exception(secrets=config.secrets)) is not None:
                raise faulty
            for warning in config.warnings:
                log.warning(warning)
            _open(session, config, options)
            is_orchestrated = config.orchestrated or options.spec_path is None
            completion = train(config, session, allow_changed=options.allow_changed, may_have_completed=is_orchestrated)
            code = session.complete(completion)
            if session.event_log is not None:
                _show_results(config, completion)
        except BaseException as caught:  # noqa: BLE001
            error = session.explain(caught)
            session.only_prints = session.is_rank_zero and _only_prints(session, config, options, error)
            if session.only_prints:
                forget_beginning(config.artifacts_dir)
            has_sender = session.uploader is not None or config.uploads.terminal_url is None
            is_open = session.folder is not None and has_sender
            if session.is_rank_zero and not is_open and not session.only_prints:
                _open_for_failed_start(session, config, options, error)
            code = session.fail(error)
        return code, session.cause


def _session(config: RunConfig, options: RunOptions, signals: StopSignals) -> Session:
    """Create the session of this rank, with nothing opened yet."""
    stop = StopSources(
        config.cancel_file_path,
        max_runtime_s=config.max_runtime_seconds or None,
        age_s=None if options.age_s is None and options.began_with_process else options.age_s or 0.0,
        canceled=config.canceled,
        signals=signals,
    )
    stop.add_check(agent_check())
    if options.stop_check is not None:
        stop.add_check(options.stop_check)
    environ = os.environ if options.environ is None else options.environ
    if config.source_of("canceled") != "--set":  # the trainer may set the variable while it runs
        stop.add_check(lambda: "canceled" if is_true(environ.get(CANCEL_VARIABLE, "")) else None)
    return (Session if is_rank_zero() else FollowerSession)(
        stop=stop,
        secrets=config.secrets,
        environ=options.environ,
        deadline_s=config.upload_deadline_seconds,
        resume_hint=_resume_hint(config, options, environ),
        preparing="startup",
        is_supervised=options.is_supervised,
    )


def _open(session: Session, config: RunConfig, options: RunOptions) -> None:
    """Lock the run's folder and open its log, control plane and uploads, on rank zero; other ranks note the folder.

    Raises:
        StartupContractError: The folder cannot be used, or another run holds it.
        UploadError: A file of the upload queue is damaged.
        Exception: The control plane raised it.
    """
    if session.is_rank_zero:
        prepare_artifact_dirs(config)
        session.holds.enter_context(lock_artifacts(config))
        if options.fresh:
            move_old_artifacts_aside(config)
            forget_deaths(config.artifacts_dir)
        try:
            session.event_log = EventLog(config.events_path, run_id=config.run_id)
        except EventLogError as error:
            raise StartupContractError("startup.artifacts_in_use", str(error)) from error
    session.place(config.artifacts_dir, config.checkpoints_dir)
    session.preparing = "input"
    if session.is_rank_zero and options.lifecycle is not None:
        stop = session.stop
        session.lease = Lease(
            options.lifecycle, config.run_id, answer_s=session.deadline_s, raise_if_stopped=stop.raise_if_stopped
        )
        session.holds.callback(session.lease.close)
        stop.add_check(session.lease.reason)
    session.uploader = _open_uploader(config) if session.is_rank_zero else None
    if session.uploader is not None:
        session.uploader.start()


def _open_uploader(config: RunConfig) -> Uploader | None:
    """Create the uploader of a run without starting it; None if there is nothing to send."""
    uploads = config.upload_config()
    lacking = uploads.file_store_fault()
    if lacking and bool(uploads.owner) != bool(uploads.token):  # if both are missing, the store only serves inputs
        log.warning("%s", lacking)
    if any(uploads.wants(kind) for kind in ("metrics", "checkpoint", "sample", "terminal")):
        try:
            return Uploader(uploads)
        except ValueError as error:
            raise StartupContractError("startup.invalid_job_spec", f"{error} Correct `uploads.targets`.") from error
    try:  # without destinations nothing is delivered; silence would look as if everything had arrived
        waiting = sum(entry.kind in ("checkpoint", "sample") for entry in read_entries(Path(uploads.queue_dir)))
    except (UploadError, OSError) as error:
        log.warning("waiting uploads cannot be counted: %s", error)
    else:
        if waiting:
            text = "uploads of earlier starts are waiting (%d), but no destination is set: set the URLs, or see %s"
            log.warning(text, waiting, f"`genlight uploads list {shlex.quote(str(config.artifacts_dir))}`")
    return None


def _only_prints(session: Session, config: RunConfig, options: RunOptions, error: BaseException) -> bool:
    """Return whether `error` is only printed: it is a mistake in the command or the job of a run that has trained.

    If an orchestrator or the environment started the run, the error is reported, because nobody may read the output.
    """
    log = session.event_log
    if options.spec_path is None or config.orchestrated or (log is not None and log.phase != "new"):
        return False
    names_checkpoint = config.resume_checkpoint_path is not None and isinstance(error, InputError)
    path = log_of_failed_start(config, is_from_file=True) if log is None else log.path
    return (names_checkpoint or failure_category(error) == "startup") and path is not None and has_trained(path)


def _open_for_failed_start(session: Session, config: RunConfig, options: RunOptions, error: BaseException) -> None:
    """Open the log and the uploader that report a run that could not start, if its settings still name them.

    Every valid setting counts, whatever is wrong with the others. If one cannot be opened, that is only logged.
    """
    session.deadline_s = STARTUP_DEADLINE_S
    run_id, path = config.run_id or UNKNOWN_RUN_ID, log_of_failed_start(config, options.spec_path is not None)
    in_use = isinstance(error, StartupContractError) and error.code == "startup.artifacts_in_use"
    if session.event_log is None and path is not None and not in_use:
        with _log_if_unreported("in the event log"):
            session.event_log = EventLog(path, run_id=run_id)
    if config.uploads.terminal_url is not None:
        with _log_if_unreported("to `uploads.terminal_url`"):
            queue = session.holds.enter_context(tempfile.TemporaryDirectory())
            target = config.upload_config(run_id=run_id, queue_dir=Path(queue), targets=(), file_store_url=None)
            session.uploader = Uploader(target)  # not started: sending the one message needs no thread


@contextlib.contextmanager
def _log_if_unreported(where: str) -> Iterator[None]:
    """Log an error in reporting a failed start to one place, so that the other places still get the report."""
    try:
        yield
    except (GenlightError, OSError, ValueError) as problem:
        log.error("the failed start could not be reported %s: %s", where, problem)  # noqa: TRY400


def log_of_failed_start(config: RunConfig, is_from_file: bool) -> Path | None:
    """Return the event log of a run that could not start; None if its folder is unknown or writable by others.

    Args:
        config: The settings of the run that could be read.
        is_from_file: Whether the caller named a job file; artifacts go next to it by default.
    """
    is_set = any(config.source_of(name) != "default" for name in ("artifacts_dir", "metrics_dir", "events_path"))
    is_known = is_set or bool(config.run_id) or not is_from_file  # next to a file, the folder has the run's name
    return config.events_path if is_known and not untrusted_dirs(config) else None


def _resume_hint(config: RunConfig, options: RunOptions, environ: Mapping[str, str]) -> str:
    """Return how to continue a run, with the command if the job is a file."""
    spec = options.spec_path or environ.get(JOB_VARIABLE)
    if spec is None or os.fspath(spec) == "-":
        return "To continue, start the run again with resume_from_latest."
    overrides = [*options.overrides, *([] if config.resume_from_latest else ["resume_from_latest=true"])]
    settings = [word for override in overrides for word in ("--set", override)]
    return f"To continue:\n  {shlex.join(['genlight', 'run', os.fspath(spec), *settings])}"


def _show_results(config: RunConfig, completion: Completion) -> None:
    """Show how the run ended, and the paths of its results."""
    places = {"checkpoints": config.checkpoints_dir, "samples": config.samples_dir, "events": config.events_path}
    ended = f"run {config.run_id} {completion}"
    show_results(ended, {"final checkpoint": completion.final_checkpoint, **places})
