"""How an attempt is reported to have ended: exactly once, whichever thread comes first."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...callbacks.checkpoint.format.layout import step_name
from ...callbacks.stop.sources import StopSources, cancel_file_is_set
from ...reporters.events.event_log import EventLog
from ...reporters.uploads import TerminalPayload
from ..contract.exceptions import (
    CheckpointError,
    ContractError,
    EvaluationError,
    EventLogError,
    HookOrderError,
    InputError,
    MonitorError,
    RankFailed,
    ShadowMismatchError,
    StartupContractError,
    ThreadLimitError,
    TrainingCanceled,
    TrainingHung,
    UploadError,
)
from ..job.config import RunConfig
from ..plumbing.failures import (
    EXIT_COMPLETED,
    EXIT_FAILED,
    Failure,
    describe_failure,
    stop_before,
    stop_behind_lost_worker,
)
from ..plumbing.redaction import hide_secrets, text_of, traceback_of
from ..plumbing.reference_page import reference_for
from .progress import Progress
from .ranks.child_processes import RankProcesses
from .ranks.failure_notes import RankFailures
from .ranks.rank_zero_exit import leave_exit_code
from .traceback_report import FAILURES_DIRECTORY, report_traceback
from .uploads import settle

if TYPE_CHECKING:
    from ...reporters.uploads import Uploader
    from .control_plane import LifecycleSession

__all__ = ["Completion", "Outcome", "log_failure"]

log = logging.getLogger(__name__)

LAST_TRY_S = 5.0
"""How long a message is tried where the uploads before it took all the time."""

_SAY_ALL = (
    StartupContractError,
    InputError,
    ContractError,
    CheckpointError,
    EvaluationError,
    EventLogError,
    HookOrderError,
    MonitorError,
    UploadError,
    RankFailed,
    ShadowMismatchError,
    ThreadLimitError,
    TrainingHung,
    TrainingCanceled,
)
"""Failures whose message says all; a traceback would bury it."""


@dataclass(frozen=True)
class Completion:
    """How a run that completed ended."""

    step: int
    final_checkpoint: Path | None
    stopped: str | None = None


class Outcome:
    """Leaves the one terminal event of an attempt, its last line.

    Required uploads settle, the terminal message is acknowledged, then the event says how it ended. The training
    thread ends an attempt by `complete` or `fail`; a thread that watches over it by `fail_and_exit`, where the
    training thread may hang for ever.

    All of it shares one deadline. A stop ends the wait for uploads where a run was about to complete. The terminal
    message is waited for until the deadline all the same: it may have arrived, and must then stay the only one, so an
    event that says otherwise would be false. Who takes machines away sooner sets a shorter deadline, or signals again.

    A failure of a run that is being stopped is reported as the stop if the checkpoint of the stop is durable, or if the
    signal itself caused it; else it is reported as what it is.

    Args:
        config: The run.
        event_log: Its log, open.
        stop: The sources of a stop; a failure that a stop signal caused is reported as the stop.
        progress: What the attempt is doing, and how far it came.
        rank_failures: What other ranks say went wrong first.
        environ: Environment whose values must not be shown; None takes the process's own.
        verbose: Log the whole traceback of an error of the user's code.
    """

    def __init__(
        self,
        config: RunConfig,
        event_log: EventLog,
        stop: StopSources,
        progress: Progress,
        rank_failures: RankFailures,
        environ: Mapping[str, str] | None = None,
        *,
        verbose: bool = False,
    ) -> None:
        self.config = config
        self.event_log = event_log
        self.stop = stop
        self.progress = progress
        self.rank_failures = rank_failures
        self.environ = environ
        self.verbose = verbose
        self.uploader: Uploader | None = None
        self.lifecycle: LifecycleSession | None = None
        self.children: RankProcesses | None = None
        """Processes of other ranks that this one started, which end with it."""
        self.cause: BaseException | None = None
        """What ended the attempt, as it was reported; None where it completed."""
        self._claim = threading.Lock()
        self._owner = 0
        self._settled = False
        self._end_by: float | None = None

    def complete(self, completion: Completion) -> int:
        """Report that the run ended as planned; returns the exit code.

        Raises:
            UploadError: Something required did not arrive by the deadline, and nothing was reported.
            TrainingCanceled: A stop was asked for first, and nothing was reported.
        """
        self._claim_in_training_thread()
        self._settled = True
        settle(self.uploader, deadline_s=self._left_s(), raise_if_stopped=self.stop.raise_if_stopped)
        self._tell_completed(completion)
        if self.lifecycle is not None:
            self.lifecycle.completed(completion.step, completion.final_checkpoint, within_s=self._left_s())
        try:
            self.event_log.completed(
                step=completion.step, final_checkpoint=completion.final_checkpoint, stopped=completion.stopped
            )
        except EventLogError as error:
            log.error("the completed run could not be recorded: %s", error)  # noqa: TRY400
            return EXIT_FAILED
        self._tell_ranks(EXIT_COMPLETED)
        return EXIT_COMPLETED

    def fail(self, error: BaseException) -> int:
        """Report what ended the run, in the training thread; returns the exit code."""
        self._claim_in_training_thread()
        error = self.cause = self._stop_behind(error) or error
        own = self._describe(error)
        first = own if isinstance(error, TrainingCanceled) else self.rank_failures.first_cause(own, time.time())
        return self._report(error, first)

    def _stop_behind(self, error: BaseException) -> TrainingCanceled | None:
        """The stop as which a failure is reported that would not have been without it, or came after its checkpoint."""
        stop = stop_before(error)
        if stop is not None and stop is not error and self._has_checkpoint(self.progress.step):
            log.error("after the run had stopped: %s", self._describe(error).text)
            return stop
        return stop_behind_lost_worker(error, self.stop.signals.reason) if stop is None else None

    def _has_checkpoint(self, step: int) -> bool:
        return (self.config.checkpoints_dir / f"{step_name(step)}.json").exists()

    def fail_and_exit(self, error: BaseException, failure: Failure | None = None) -> NoReturn:
        """Report what ended the run and end this process, whatever the training thread does.

        Never returns: where another thread is reporting already, that one ends the process, and a caller that went on
        to end it would take the report away.
        """
        if not self._claim.acquire(blocking=False):
            _wait_for_the_end()
        code = EXIT_FAILED
        try:
            own = self._describe(error)
            code = self._report(error, own if failure is None else replace(failure, resumable=own.resumable))
            if self.children is not None:
                self.children.kill()
        except BaseException:
            log.exception("the end of the run could not be reported")
        finally:
            logging.shutdown()
            os._exit(code)

    def _claim_in_training_thread(self) -> None:
        if self._claim.locked() and self._owner == threading.get_ident():
            return  # `complete` failed, and `fail` says so
        if not self._claim.acquire(blocking=False):
            _wait_for_the_end()
        self._owner = threading.get_ident()

    def _left_s(self) -> float:
        """Seconds until the deadline, which is counted from the first wait; some for a try where none are left."""
        deadline_s, now = self.config.upload_deadline_s, time.monotonic()
        if self._end_by is None:
            self._end_by = now + deadline_s
        return max(self._end_by - now, min(LAST_TRY_S, deadline_s))

    def _describe(self, error: BaseException) -> Failure:
        return describe_failure(
            error,
            stage=self.progress.stage,
            has_checkpoint=any(self.config.checkpoints_dir.glob("*.json")),
            secrets=self.config.secrets,
            environ=self.environ,
        )

    def _report(self, error: BaseException, failure: Failure) -> int:
        step = self.progress.step
        log_failure(
            error,
            failure,
            secrets=self.config.secrets,
            environ=self.environ,
            tracebacks=None if self.verbose else self.config.artifacts_dir / FAILURES_DIRECTORY,
            before_next_start=_before_next_start(self.config),
        )
        self._tell_failed(failure, step)
        if self.lifecycle is not None:
            self.lifecycle.failed(step, failure.text, within_s=self._left_s())
        self.event_log.record_failure(failure, step)
        self._tell_ranks(failure.exit_code)
        return failure.exit_code

    def _tell_ranks(self, exit_code: int) -> None:
        """Let the other ranks end, with this exit code; also removes what a rank of a killed attempt has left."""
        if self.rank_failures.has_others():
            leave_exit_code(self.config.artifacts_dir, exit_code)
        self.rank_failures.clear()

    def _tell_completed(self, completion: Completion) -> None:
        if self.uploader is None:
            return
        final = None if completion.final_checkpoint is None else str(completion.final_checkpoint)
        payload = TerminalPayload("completed", completion.step, final, attempt=self.event_log.attempt)
        error = self.uploader.deliver_terminal(payload, deadline_s=self._left_s()).error()
        if error is not None:
            raise error

    def _tell_failed(self, failure: Failure, step: int) -> None:
        """Deliver what the run has left to deliver, and how it ended; what cannot be delivered stays in the queue."""
        if self.uploader is None:
            return
        if not self._settled:  # else that was waited for already
            result = self.uploader.settle(deadline_s=self._left_s(), progress=log.info)
            if not result.ok:
                log.error("uploads of the failed run: %s", result.error())
        payload = TerminalPayload("failed", step, error=failure.text, attempt=self.event_log.attempt)
        error = self.uploader.deliver_terminal(payload, deadline_s=self._left_s()).error()
        if error is not None:
            log.error("the failure could not be reported: %s", error)


def _before_next_start(config: RunConfig) -> str:
    """How what asked the run to stop is kept from stopping its next start."""
    steps = []
    if config.cancel_file is not None and cancel_file_is_set(config.cancel_file):
        steps.append(f"remove the cancel file {str(config.cancel_file)!r}")
    if config.canceled:
        source = config.source_of("canceled")
        steps.append("leave out `--set canceled`" if source == "--set" else f"unset `{source}`")
    return " and ".join(steps)


def _wait_for_the_end() -> NoReturn:
    """Another thread is reporting, and ends the process then."""
    while True:
        time.sleep(3600)


def log_failure(
    error: BaseException,
    failure: Failure,
    *,
    secrets: Sequence[str | None],
    environ: Mapping[str, str] | None = None,
    before_next_start: str = "",
    tracebacks: Path | None = None,
) -> None:
    """Say what went wrong, with a traceback where the message alone does not tell.

    Args:
        error: What ended the run.
        failure: How it is reported.
        secrets: Texts that must not be shown.
        environ: Environment whose values must not be shown; None takes the process's own.
        tracebacks: The folder for the whole traceback of an error of the user's code, of which the log then shows the
            user's frames; None logs it whole.
        before_next_start: What has to be done after a stop, or it would stop the next start as well.
    """
    if isinstance(error, TrainingCanceled):
        first = f"{before_next_start}, then " if before_next_start else ""
        log.warning("stopped: %s; %sstart the run again with resume_from_latest to go on", error.reason, first)
        return

    def hide(text: str) -> str:
        return hide_secrets(text, secrets=secrets, environ=environ)

    if isinstance(error, _SAY_ALL):
        text = hide(text_of(error))
    elif tracebacks is None:
        text = hide(traceback_of(error))
    else:
        text = report_traceback(error, tracebacks, hide)
    log.error("%s failure: %s", failure.category, text)
    if isinstance(error, StartupContractError) and (about := reference_for(error.code)) is not None:
        log.info(about)
