"""One attempt of a job, from its settings to its exit code.

From the moment the event log is open every way out leaves exactly one terminal event.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources, cancel_file_is_set
from ...reporters.events.event_log import EventLog
from ...reporters.uploads import Uploader
from ..contract.exceptions import EventLogError, GenlightError, StartupContractError
from ..contract.types import JobLifecycleClient
from ..job.config import UNKNOWN_RUN_ID, RunConfig, read_run_config
from ..job.sources import JOB_VARIABLE
from ..plumbing.failures import EXIT_FAILED, EXIT_STARTUP
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.operating_system import require_linux
from ..plumbing.settings import is_true
from .artifact_dirs import prepare_artifact_dirs, untrusted_dirs
from .artifacts_lock import lock_artifacts
from .control_plane import LifecycleSession
from .ranks.this_rank import is_rank_zero
from .ranks.watch import agent_check
from .results import show_results
from .resume import move_old_artifacts_aside
from .session import Completion, FollowerSession, Session
from .training import train
from .uploads import open_uploader, upload_config

__all__ = ["run_job", "run_training_runtime_from_env"]

require_linux(__name__)

log = logging.getLogger(__name__)

CANCEL_VARIABLE = "TRAINER_CANCELLED"
STARTUP_DEADLINE_S = 10.0
"""How long a run that cannot start tries to say so."""


@dataclass(frozen=True)
class RunOptions:
    """The options of the command line beyond a job."""

    spec_path: str | os.PathLike[str] | None = None
    overrides: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    fresh: bool = False
    """Move artifacts of earlier runs aside and start at step 0."""
    allow_changed: bool = False
    """Resume although the job is not that of the checkpoint."""
    verbose: bool = False
    """Log the whole traceback of an error of the user's code, instead of writing it to a file."""
    began_with_process: bool = False
    """Whether a time limit counts from the start of the process, as of the command line; else from the call."""
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
    """The error that ended it, where it did not complete; it has been reported."""


def run_job(options: RunOptions) -> int:
    """Run a job and return the exit code: 0 completed, 1 failed, 2 startup, 75 stopped but resumable."""
    return attempt_job(options).exit_code


def attempt_job(options: RunOptions) -> Attempt:
    """Run a job, report how it ended, and tell the caller too."""
    with contextlib.ExitStack() as held:
        signals = held.enter_context(StopSignals().installed())
        signals.what_next = "the run stops before it trains" if is_rank_zero() else ""
        config, errors = read_run_config(
            spec_path=options.spec_path, overrides=options.overrides, environ=options.environ
        )
        held.enter_context(redacted_logs(config.secrets, options.environ))
        try:
            if (faulty := errors.exception(secrets=config.secrets)) is not None:
                raise faulty
            for warning in config.warnings:
                log.warning(warning)
            session = held.enter_context(_open_session(config, options, signals))
        except Exception as error:  # noqa: BLE001 - whatever keeps a run from starting is reported
            _report_failed_start(error, config, options)
            return Attempt(EXIT_STARTUP, error)
        try:  # whatever ends the run from here on, its log ends with a terminal event
            _open_connections(config, options, session)
            completion = train(config, session, allow_changed=options.allow_changed)
            if session.uploader is not None:
                signals.what_next = "the run ends without waiting for the rest of its uploads"
            code = session.complete(completion)
            if session.event_log is not None:
                _show_results(config, completion)
        except BaseException as error:  # noqa: BLE001
            code = session.fail(error)
        try:
            session.close_log()
        except EventLogError as error:
            log.error("the event log may not be durable: %s", error)  # noqa: TRY400
            return Attempt(code or EXIT_FAILED, session.cause or error)
        return Attempt(code, session.cause)


def _open_session(config: RunConfig, options: RunOptions, signals: StopSignals) -> Session:
    """The session of this rank; of rank zero with the run's folder, which it holds, and the event log, open.

    Raises:
        StartupContractError: The folder cannot be used, or another run holds it.
    """
    stop = StopSources(
        config.cancel_file_path,
        max_runtime_s=config.max_runtime_seconds or None,
        age_s=None if options.began_with_process else 0.0,
        canceled=config.canceled,
        signals=signals,
    )
    stop.add_check(agent_check())
    environ = os.environ if options.environ is None else options.environ
    if config.source_of("canceled") != "--set":  # the trainer may set it, in this process, while it runs
        stop.add_check(lambda: "canceled" if is_true(environ.get(CANCEL_VARIABLE, "")) else None)
    session = (Session if is_rank_zero() else FollowerSession)(
        stop,
        secrets=config.secrets,
        environ=options.environ,
        verbose=options.verbose,
        deadline_s=config.upload_deadline_seconds,
    )
    session.way_on = functools.partial(_way_on, config)
    session.next_command = _next_command(config, options)
    if session.is_rank_zero:
        prepare_artifact_dirs(config)
        session.hold(lock_artifacts(config))
        with contextlib.ExitStack() as unless_it_opens:
            unless_it_opens.push(session)
            if options.fresh:
                move_old_artifacts_aside(config)
            try:
                session.event_log = EventLog(config.events_path, run_id=config.run_id)
            except EventLogError as error:
                raise StartupContractError("startup.artifacts_in_use", str(error)) from error
            unless_it_opens.pop_all()
    session.place(config.artifacts_dir, config.checkpoints_dir)
    if session.is_rank_zero and session.rank_files is not None:
        stop.add_check(session.rank_files.stop_reason)
    return session


def _report_failed_start(error: Exception, config: RunConfig, options: RunOptions) -> None:
    """Report a run that could not start wherever its settings still name a place for that, by a session of its own.

    Every sound setting counts, whatever is wrong with the others. What cannot be reported is only logged.
    """
    with contextlib.ExitStack() as open_until_reported:
        session = (Session if is_rank_zero() else FollowerSession)(
            StopSources(),
            secrets=config.secrets,
            environ=options.environ,
            deadline_s=STARTUP_DEADLINE_S,
        )
        session.preparing = "startup"
        run_id, path = config.run_id or UNKNOWN_RUN_ID, log_of_failed_start(config, options.spec_path is not None)
        in_use = isinstance(error, StartupContractError) and error.code == "startup.artifacts_in_use"
        if session.is_rank_zero and path is not None and not in_use:
            with _logged_failure("in the event log"):
                session.event_log = open_until_reported.enter_context(EventLog(path, run_id=run_id))
        if session.is_rank_zero and config.uploads.terminal_url is not None:
            with _logged_failure("to `uploads.terminal_url`"):
                queue = open_until_reported.enter_context(tempfile.TemporaryDirectory())
                target = upload_config(config, run_id=run_id, queue_dir=Path(queue), targets=(), file_store_url=None)
                # It needs no thread for this message.
                session.uploader = open_until_reported.enter_context(contextlib.closing(Uploader(target)))
        session.fail(error)


@contextlib.contextmanager
def _logged_failure(where: str) -> Iterator[None]:
    """One place where a failed start cannot be reported keeps it from no other."""
    try:
        yield
    except (GenlightError, OSError, ValueError) as problem:
        log.error("that the run could not start is not reported %s: %s", where, problem)  # noqa: TRY400


def log_of_failed_start(config: RunConfig, is_from_file: bool) -> Path | None:
    """The event log of a run that could not start; None where its folder is not known, or others may write there.

    Args:
        config: What is known of the run.
        is_from_file: Whether the caller named a job file, beside which artifacts go by default.
    """
    is_given = any(config.source_of(name) != "default" for name in ("artifacts_dir", "metrics_dir", "events_path"))
    is_known = is_given or bool(config.run_id) or not is_from_file  # beside a file the folder has the run's name
    return config.events_path if is_known and not untrusted_dirs(config) else None


def _open_connections(config: RunConfig, options: RunOptions, session: Session) -> None:
    """Claim the run from its control plane, and begin to upload; only rank zero does either."""
    if not session.is_rank_zero:
        return
    if options.lifecycle is not None:
        lifecycle = LifecycleSession(
            options.lifecycle,
            config.run_id,
            interval_s=options.heartbeat_s,
            answer_s=config.upload_deadline_seconds,
            raise_if_stopped=session.stop.raise_if_stopped,
        )
        session.hold(lifecycle)
        session.lifecycle = lifecycle
        session.stop.add_check(lifecycle.reason)
    session.uploader = open_uploader(config)
    if session.uploader is not None:
        session.hold(contextlib.closing(session.uploader))
        session.uploader.start()


def _way_on(config: RunConfig) -> str:
    """The way to continue; first, how what asks the run to stop is kept from stopping its next start."""
    steps = []
    if config.cancel_file_path is not None and cancel_file_is_set(config.cancel_file_path):
        steps.append(f"remove the cancel file {str(config.cancel_file_path)!r}")
    if config.canceled:
        source = config.source_of("canceled")
        steps.append("leave out `--set canceled`" if source == "--set" else f"unset `{source}`")
    first = f"{' and '.join(steps)}, then " if steps else ""
    return f"{first}start the run again with resume_from_latest to go on"


def _next_command(config: RunConfig, options: RunOptions) -> str:
    """The command that goes on with a run; empty where no file names it."""
    spec = options.spec_path or (os.environ if options.environ is None else options.environ).get(JOB_VARIABLE)
    if spec is None or os.fspath(spec) == "-":
        return ""
    overrides = [*options.overrides, *([] if config.resume_from_latest else ["resume_from_latest=true"])]
    settings = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["genlight", "run", os.fspath(spec), *settings])


def _show_results(config: RunConfig, completion: Completion) -> None:
    """Say how the run ended, and where everything is."""
    stopped = f" ({completion.stopped})" if completion.stopped else ""
    if not completion.finite:
        stopped += ", but its final weights are not finite (nan or infinite)"
    show_results(
        f"run {config.run_id} completed at step {completion.step}{stopped}",
        final=completion.final_checkpoint,
        checkpoints=config.checkpoints_dir,
        samples=config.samples_dir,
        logs={"events": config.events_path},
    )
