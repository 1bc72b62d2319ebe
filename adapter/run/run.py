"""One attempt of a job, from its settings to its exit code.

From the moment the event log is open every way out leaves exactly one terminal event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources
from ...reporters.events.event_log import EventLog
from ...reporters.uploads import Uploader
from ...reporters.uploads.queue import read_entries
from ..contract.exceptions import EventLogError, GenlightError, InputError, StartupContractError, UploadError
from ..contract.types import JobLifecycleClient
from ..job.config import UNKNOWN_RUN_ID, RunConfig, read_run_config
from ..job.sources import JOB_VARIABLE
from ..plumbing.failures import failure_category
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.operating_system import require_linux
from ..plumbing.settings import is_true
from .attempts import has_trained
from .control_plane import Lease
from .folder import lock_artifacts, prepare_artifact_dirs, untrusted_dirs
from .ranks import agent_check
from .report import show_results
from .session import Completion, FollowerSession, Session
from .start import move_old_artifacts_aside
from .this_rank import is_rank_zero
from .training import train

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
    began_with_process: bool = False
    """Whether a time limit counts from the start of the process, as of the command line; else from the call."""
    lifecycle: JobLifecycleClient | None = None
    """The control plane that hands out runs: it is claimed there, kept alive, and reported. No setting makes one."""


def run_training_runtime_from_env() -> int:
    """Run the job that the environment describes, and return the exit code.

    The function of this name that `gen_worker.trainer` gives raises what ended the run instead.
    """
    return run_job(RunOptions())


def run_job(options: RunOptions) -> int:
    """Run a job and return the exit code: 0 completed, 1 failed, 2 startup, 75 stopped but resumable."""
    return attempt_job(options)[0]


def attempt_job(options: RunOptions) -> tuple[int, BaseException | None]:
    """Run a job and report how it ended; the exit code, and the error that was reported where it did not complete."""
    with contextlib.ExitStack() as held:
        handling = StopSignals.handling() if options.began_with_process else None
        signals = handling or held.enter_context(StopSignals().installed())
        signals.say("the run stops before it trains" if is_rank_zero() else "")
        config, errors = read_run_config(
            spec_path=options.spec_path, overrides=options.overrides, environ=options.environ
        )
        held.enter_context(redacted_logs(config.secrets, options.environ))
        session = held.enter_context(_session(config, options, signals))
        try:  # whatever ends the run, its log ends with a terminal event
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
        except BaseException as error:  # noqa: BLE001
            session.only_prints = session.is_rank_zero and _only_prints(session, config, options, error)
            if session.is_rank_zero and session.folder is None and not session.only_prints:
                _open_for_failed_start(session, config, options, error)
            code = session.fail(error)
        return code, session.cause


def _session(config: RunConfig, options: RunOptions, signals: StopSignals) -> Session:
    """The session of this rank, with nothing opened yet."""
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
    return (Session if is_rank_zero() else FollowerSession)(
        stop=stop,
        secrets=config.secrets,
        environ=options.environ,
        deadline_s=config.upload_deadline_seconds,
        resume_hint=_way_on(config, options, environ),
        preparing="startup",
    )


def _open(session: Session, config: RunConfig, options: RunOptions) -> None:
    """Open what the attempt needs: on rank zero the run's folder, which it holds, log, control plane and uploads.

    Raises:
        StartupContractError: The folder cannot be used, or another run holds it.
        UploadError: A file of the queue of uploads is damaged.
        Exception: What the control plane raised.
    """
    if session.is_rank_zero:
        prepare_artifact_dirs(config)
        session.holds.enter_context(lock_artifacts(config))
        if options.fresh:
            move_old_artifacts_aside(config)
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
    """The uploader of a run, which still has to be started; None where nothing is to be sent."""
    wanted = config.upload_config()
    lacking = wanted.file_store_fault()
    if lacking and bool(wanted.owner) != bool(wanted.token):  # else the store is there for `cozy:` references
        log.warning("%s", lacking)
    if any(wanted.wants(kind) for kind in ("metrics", "checkpoint", "sample", "terminal")):
        try:
            return Uploader(wanted)
        except ValueError as error:
            raise StartupContractError("startup.invalid_job_spec", f"{error} Correct `uploads.targets`.") from error
    try:  # a start without destinations delivers nothing, and would look as if all had arrived
        waiting = sum(entry.kind in ("checkpoint", "sample") for entry in read_entries(Path(wanted.queue_dir)))
    except (UploadError, OSError) as error:
        log.warning("what is waiting for upload cannot be determined: %s", error)
    else:
        if waiting:
            text = "uploads of earlier starts are waiting (%d), but no destination is set: set the URLs, or see %s"
            log.warning(text, waiting, f"`genlight uploads list {shlex.quote(str(config.artifacts_dir))}`")
    return None


def _only_prints(session: Session, config: RunConfig, options: RunOptions, error: BaseException) -> bool:
    """Whether `error` is a mistake in the command or the job of a run that has trained, which its log must not get.

    An orchestrator, which starts runs from the environment, still gets it: nobody may read what it prints.
    """
    log = session.event_log
    if options.spec_path is None or config.orchestrated or (log is not None and log.phase != "new"):
        return False
    names_checkpoint = config.resume_checkpoint_path is not None and isinstance(error, InputError)
    path = log_of_failed_start(config, is_from_file=True) if log is None else log.path
    return (names_checkpoint or failure_category(error) == "startup") and path is not None and has_trained(path)


def _open_for_failed_start(session: Session, config: RunConfig, options: RunOptions, error: BaseException) -> None:
    """Open what reports a run that could not start, wherever its settings still name a place for that.

    Every sound setting counts, whatever is wrong with the others. What cannot be opened is only logged.
    """
    session.deadline_s = STARTUP_DEADLINE_S
    run_id, path = config.run_id or UNKNOWN_RUN_ID, log_of_failed_start(config, options.spec_path is not None)
    in_use = isinstance(error, StartupContractError) and error.code == "startup.artifacts_in_use"
    if session.event_log is None and path is not None and not in_use:
        with _logged_failure("in the event log"):
            session.event_log = EventLog(path, run_id=run_id)
    if config.uploads.terminal_url is not None:
        with _logged_failure("to `uploads.terminal_url`"):
            queue = session.holds.enter_context(tempfile.TemporaryDirectory())
            target = config.upload_config(run_id=run_id, queue_dir=Path(queue), targets=(), file_store_url=None)
            session.uploader = Uploader(target)  # which needs no thread for this message


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


def _way_on(config: RunConfig, options: RunOptions, environ: Mapping[str, str]) -> str:
    """The way to continue a run, with the command where a file names it."""
    spec = options.spec_path or environ.get(JOB_VARIABLE)
    if spec is None or os.fspath(spec) == "-":
        return "Start the run again with resume_from_latest to go on."
    overrides = [*options.overrides, *([] if config.resume_from_latest else ["resume_from_latest=true"])]
    settings = [word for override in overrides for word in ("--set", override)]
    return f"To go on:\n  {shlex.join(['genlight', 'run', os.fspath(spec), *settings])}"


def _show_results(config: RunConfig, completion: Completion) -> None:
    """Say how the run ended, and where everything is."""
    places = {"checkpoints": config.checkpoints_dir, "samples": config.samples_dir, "events": config.events_path}
    ended = f"run {config.run_id} {completion}"
    show_results(ended, {"final checkpoint": completion.final_checkpoint, **places})
