"""One attempt of a job, from its settings to its exit code.

From the moment the event log is open every way out leaves exactly one terminal event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import process_age_s
from ...callbacks.tracking import RUNS_FILE
from ...reporters.events.event_log import EventLog
from ...reporters.events.goodput import account_of
from ..contract.exceptions import EventLogError, StartupContractError
from ..contract.types import JobLifecycleClient
from ..job.config import RunConfig, resolve_run_config
from ..plumbing.failures import EXIT_FAILED, Failure
from ..plumbing.log_redaction import redacted_logs
from ..plumbing.operating_system import require_linux
from ..plumbing.redaction import traceback_of
from .artifact_dirs import prepare_artifact_dirs, sweep_probes
from .artifacts_lock import lock_artifacts
from .control_plane import LifecycleSession
from .follower import Follower
from .outcome import Completion, Outcome
from .progress import Progress
from .ranks.failure_notes import RankFailures
from .ranks.rank_zero_exit import forget_exit_code
from .ranks.this_rank import is_rank_zero
from .results import newest_picture, show_results
from .resume import move_old_artifacts_aside
from .startup_failure import report_startup_failure
from .training import Training, stop_sources
from .uploads import open_uploader

__all__ = ["run_job", "run_training_runtime_from_env"]

require_linux(__name__)

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
    shadow: int = 0
    """How many of the first steps are compared with a plain loop; 0 compares none."""
    verbose: bool = False
    """Log the whole traceback of an error of the user's code, instead of writing it to a file."""
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
        if is_rank_zero():
            signals.what_next = "the run stops before it trains"
        try:
            config = resolve_run_config(
                spec_path=options.spec_path, overrides=options.overrides, environ=options.environ
            )
            with redacted_logs(config.secrets, options.environ):
                return _run(config, options, signals)
        except Exception as error:  # noqa: BLE001 - whatever keeps a run from starting is reported
            code = report_startup_failure(
                error, spec_path=options.spec_path, overrides=options.overrides, environ=options.environ
            )
            return Attempt(code, error)


def _run(config: RunConfig, options: RunOptions, signals: StopSignals) -> Attempt:
    for warning in config.warnings:
        log.warning(warning)
    if not is_rank_zero():
        follower = Follower(config, signals, options.environ, verbose=options.verbose)
        return Attempt(*follower.run(allow_changed=options.allow_changed, shadow=options.shadow))
    prepare_artifact_dirs(config)
    with lock_artifacts(config):
        sweep_probes(config)
        if options.fresh:
            _start_afresh(config)
        return _owning(_open_event_log(config), config, options, signals)


def _owning(event_log: EventLog, config: RunConfig, options: RunOptions, signals: StopSignals) -> Attempt:
    """An attempt that owns its log: a failure from here on is not a failed start, and is not reported as one."""
    try:
        attempt = _attempt(config, options, signals, event_log)
    except BaseException as error:  # noqa: BLE001 - no other code may report this attempt
        log.error("the end of the run could not be reported: %s", traceback_of(error))  # noqa: TRY400
        attempt = Attempt(EXIT_FAILED, error)
        if event_log.phase != "ended":
            text = "the end of the run could not be reported"
            event_log.record_failure(Failure("train-step", text, resumable=False, exit_code=EXIT_FAILED), step=0)
    try:
        event_log.close()
    except EventLogError as error:
        log.error("the event log may not be durable: %s", error)  # noqa: TRY400
        return Attempt(attempt.exit_code or EXIT_FAILED, attempt.error or error)
    return attempt


def _open_event_log(config: RunConfig) -> EventLog:
    try:
        return EventLog(config.events_path, run_id=config.run_id)
    except EventLogError as error:
        raise StartupContractError("startup.artifacts_in_use", str(error)) from error


def _attempt(config: RunConfig, options: RunOptions, signals: StopSignals, event_log: EventLog) -> Attempt:
    """Everything after the event log is open; leaves exactly one terminal event."""
    ranks = RankFailures(config.artifacts_dir, expects_ranks=False)
    forget_exit_code(config.artifacts_dir)
    ranks.forget_earlier(time.time() - process_age_s())
    stop, progress = stop_sources(config, signals), Progress(event_log)
    stop.add_check(ranks.stop_reason)
    outcome = Outcome(config, event_log, stop, progress, ranks, options.environ, verbose=options.verbose)
    training = Training(config, stop, progress, outcome, outcome.fail_and_exit)
    with contextlib.ExitStack() as stack:
        try:
            if options.lifecycle is not None:
                session = LifecycleSession(
                    options.lifecycle,
                    config.run_id,
                    interval_s=options.heartbeat_s,
                    answer_s=config.upload_deadline_s,
                    raise_if_stopped=stop.raise_if_stopped,
                )
                outcome.lifecycle = stack.enter_context(session)
                stop.add_check(outcome.lifecycle.reason)
            outcome.uploader = open_uploader(config)
            if outcome.uploader is not None:
                stack.callback(outcome.uploader.close)
                outcome.uploader.start()
            completion = training.run(allow_changed=options.allow_changed, shadow=options.shadow)
            signals.what_next = "the run ends without waiting for the rest of its uploads" if outcome.uploader else ""
            code = outcome.complete(completion)
        except BaseException as error:  # noqa: BLE001 - whatever ends the run, its log ends with a terminal event
            return Attempt(outcome.fail(error), outcome.cause or error)
    _show_results(config, completion)
    return Attempt(code)


def _start_afresh(config: RunConfig) -> None:
    moved = move_old_artifacts_aside(config)
    (config.events_path.parent / RUNS_FILE).unlink(missing_ok=True)
    if moved is not None:
        log.info("moved earlier artifacts to %s", moved)


def _show_results(config: RunConfig, completion: Completion) -> None:
    """Say where everything is."""
    has_samples = any(config.samples_dir.iterdir())
    places: dict[str, Path | None] = {
        "final checkpoint": completion.final_checkpoint,
        "checkpoints": config.checkpoints_dir,
        "samples": config.samples_dir if has_samples else None,
        "events": config.events_path,
        "a picture to open": newest_picture(config.samples_dir),
    }
    stopped = f" ({completion.stopped})" if completion.stopped else ""
    spent = _time_spent(config.events_path)
    show_results(f"run {config.run_id} completed at step {completion.step}{stopped}{spent}", places)


def _time_spent(events_path: Path) -> str:
    """What a completed run says of its time; nothing where its log, of an earlier attempt say, is damaged."""
    try:
        account = account_of(events_path)
    except EventLogError as error:
        log.warning("what this run spent its time on is not known: %s", error)
        return ""
    if account is None or not account.is_measured:
        return ""
    return f"; {account.goodput:.0%} of {account.wall_s:,.0f} s were steps whose work was kept"
