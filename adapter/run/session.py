"""A session: what one attempt to train has, and how it is reported to end.

``genlight run`` and ``genlight fit`` each open one. It holds what can stop the attempt, its event log, its uploads, the
watch over the other ranks and how far the attempt came. The callbacks and loggers of the fit get it once, by
``join_run``. However the attempt ends, `Session.complete`, `Session.fail` or `Session.end_now` reports it, once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from typing_extensions import override

from ...callbacks.checkpoint.format.record import is_record_of_callback, record_paths, step_name, step_of_name
from ...callbacks.stop.signals import exit_on_signal
from ...callbacks.stop.sources import StopSources
from ..contract.exceptions import EventLogError, FailureCategory, GenlightError, RankFailedError, TrainingCanceled
from ..plumbing.failures import (
    EXIT_COMPLETED,
    EXIT_FAILED,
    EXIT_STOPPED,
    Failure,
    describe_failure,
    stop_before,
    stop_behind_lost_worker,
)
from ..plumbing.redaction import traceback_of
from .artifacts_lock import STOP_NAME, withdraw_stop
from .failure_report import FAILURES_DIRECTORY, log_failure
from .ranks.rank_files import RankFiles
from .ranks.this_rank import this_rank
from .ranks.watch import FailedElsewhere, RankProcesses, RankWatch, RankZero, first_cause, paused_ranks
from .results import shown_path

if TYPE_CHECKING:
    from ...callbacks.checkpoint.format.record import RecordMeta
    from ...reporters.events.event_log import EventLog
    from ...reporters.uploads import Uploader
    from .control_plane import LifecycleSession

__all__ = ["Completion", "FollowerSession", "Session"]

log = logging.getLogger(__name__)

LAST_TRY_S = 5.0
"""How long a message is tried where the uploads before it took all the time."""
REPORTED_WITHIN_S = 60.0
"""How much longer than its uploads may take rank zero's end is waited for, where it cannot be seen."""
ACKNOWLEDGED_WITHIN_S = 15.0
"""How long a rank that failed stays for rank zero to read why: a launcher ends the rest when one leaves."""


@dataclass(frozen=True)
class Completion:
    """How a run that completed ended."""

    step: int
    final_checkpoint: Path | None
    stopped: str | None = None
    finite: bool = True
    """Whether no weight of the final checkpoint is known to be nan or infinite."""
    was_reported: bool = False
    """Whether an older runtime ended the run, and sent the terminal message."""


class Session:
    """The session of rank zero, which leaves the one terminal event of the attempt, its last line.

    Required uploads settle, the terminal message is acknowledged, then the event says how it ended. The training
    thread ends an attempt by `complete` or `fail`; a thread that watches over it by `end_now`, where the training
    thread may hang for ever.

    All of it shares one deadline. A stop ends the wait for uploads where a run was about to complete. The terminal
    message is waited for until the deadline all the same: it may have arrived, and must then stay the only one, so an
    event that says otherwise would be false. Who takes machines away sooner sets a shorter deadline, or signals again.

    A failure of a run that is being stopped is reported as the stop if the checkpoint of the stop is durable, or if the
    signal itself caused it; else it is reported as what it is.

    A context: leaving it ends what `hold` and `on_exit` were given, the last first.

    Args:
        stop: What can ask the attempt to stop.
        secrets: Texts that no report may show.
        environ: Environment whose values no report may show; None takes the process's own.
        verbose: Log the whole traceback of an error of the user's code, instead of writing it to a file.
        deadline_s: How long the end waits for uploads and messages.
    """

    is_rank_zero = True

    def __init__(
        self,
        stop: StopSources,
        *,
        secrets: Sequence[str | None] = (),
        environ: Mapping[str, str] | None = None,
        verbose: bool = False,
        deadline_s: float = 60.0,
    ) -> None:
        self.stop = stop
        self.secrets = secrets
        self.environ = environ
        self.verbose = verbose
        self.deadline_s = deadline_s
        self.folder: Path | None = None
        self.checkpoints_dir: Path | None = None
        self.rank_files: RankFiles | None = None
        """The files by which ranks inform each other."""
        self.event_log: EventLog | None = None
        """The log of this attempt, open; None where a logger of the fit keeps its own, and on the other ranks."""
        self.uploader: Uploader | None = None
        self.lifecycle: LifecycleSession | None = None
        self.record: RecordMeta | None = None
        """Metadata of the run for every checkpoint record; None leaves it to the `Checkpoint` callback."""
        self.way_on: Callable[[], str] = lambda: "start it again"
        """Says what a user does to go on after a stop or a failure."""
        self.next_command = ""
        """The command that does it."""
        self.preparing: FailureCategory = "model-load"
        """The part that was being prepared last."""
        self.count_steps: Callable[[], int] = lambda: 0
        """Gives the step that is being executed, else the completed ones."""
        self.reports_at_once = True
        """Whether a failure of another rank is reported by the watch. A fit whose callbacks keep log and uploads has
        some seconds to end by itself, of what the failure does to its collectives."""
        self.expects_ranks = False
        """Whether there are other ranks."""
        self.processes: RankProcesses | None = None
        """Those of other ranks that this one started, which end with it."""
        self.before_report: list[Callable[[], None]] = []
        """Called before `end_now` reports: what the training thread would have reported first."""
        self.before_exit: list[Callable[[BaseException], None]] = []
        """Called before `end_now` ends the process."""
        self.cause: BaseException | None = None
        """The error that ended the attempt, as it was reported; None where it completed."""
        self.watch = RankWatch(self.end_now)
        self._held = contextlib.ExitStack()
        self._claim = threading.Lock()
        self._owner = 0
        self._cause_elsewhere: Failure | None = None
        self._settled = False
        self._end_by: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()
        self._held.close()

    def hold(self, what: contextlib.AbstractContextManager[object]) -> None:
        """Enter a context, which is left with the session."""
        self._held.enter_context(what)

    def place(self, folder: Path | None, checkpoints_dir: Path | None) -> None:
        """Say where the attempt has its files.

        Args:
            folder: Its own folder: for tracebacks, and for what ranks leave for each other. None where it has none.
            checkpoints_dir: Where it saves; None where it saves nothing that a later one can go on from.
        """
        self.folder, self.checkpoints_dir = folder, checkpoints_dir
        self.rank_files = None if folder is None else RankFiles(folder)
        if folder is not None and self.is_rank_zero:
            withdraw_stop(folder)  # It was meant for an earlier attempt.
            self.stop.cancel_files.append(folder / STOP_NAME)

    def on_exit(self, act: Callable[[], None]) -> None:
        """Call `act` when the session is left."""
        self._held.callback(act)

    @property
    def step(self) -> int:
        """The step at which a failure happened; 0 before the first."""
        return self.count_steps()

    @property
    def stage(self) -> FailureCategory:
        """The current stage, for a failure whose type does not give its category."""
        has_started = self.step > 0 if self.event_log is None else self.event_log.phase != "new"
        return "train-step" if has_started else self.preparing

    # the end

    def complete(self, completion: Completion | None = None) -> int:
        """Report that the attempt ended as planned; returns the exit code.

        Raises:
            UploadError: Something required did not arrive by the deadline, and nothing was reported.
            TrainingCanceled: A stop was asked for first, and nothing was reported.
        """
        self._claim_in_training_thread()
        self._settled = True
        if completion is not None:
            self._settle()
            self._send_completed(completion)
            if self.lifecycle is not None:
                self.lifecycle.completed(completion.step, completion.final_checkpoint, within_s=self._left_s())
            if self.event_log is not None:
                try:
                    self.event_log.completed(
                        step=completion.step,
                        final_checkpoint=completion.final_checkpoint,
                        stopped=completion.stopped,
                        finite=completion.finite,
                    )
                except EventLogError as error:
                    log.error("the completed run could not be recorded: %s", error)  # noqa: TRY400
                    return EXIT_FAILED
        self._inform_ranks(EXIT_COMPLETED)
        return EXIT_COMPLETED

    def fail(self, error: BaseException) -> int:
        """Report what ended the attempt, in the training thread; returns the exit code, whatever goes wrong here."""
        try:
            self._claim_in_training_thread()
            error = self.cause = self._stop_behind(error) or error
            own = self._describe(error)
            first = self.first_cause(own)
            if first is not own:
                error = self.cause = FailedElsewhere(first)
            return self._report(error, first)
        except BaseException as problem:  # noqa: BLE001 - no other code may report this attempt
            self.cause = problem
            log.error("the end of the run could not be reported: %s", traceback_of(problem))  # noqa: TRY400
            if self.event_log is not None and self.event_log.phase != "ended":
                text = "the end of the run could not be reported"
                self.event_log.record_failure(Failure("train-step", text, resumable=False, exit_code=EXIT_FAILED), 0)
            return EXIT_FAILED

    def end_now(self, error: BaseException) -> NoReturn:
        """Report what ended the attempt and end this process, whatever the training thread does.

        Never returns: where another thread is reporting already, that one ends the process, and a caller that went on
        to end it would take the report away.
        """
        if not self._claim.acquire(blocking=False):
            _wait_for_the_end()
        code = EXIT_FAILED
        for report in self.before_report:
            try:
                report()
            except Exception:
                log.exception("not all of what the training did could be reported")
        try:
            code = self._report(error, self._describe(error))
            for act in self.before_exit:
                act(error)
            if self.processes is not None:
                self.processes.kill()
        except BaseException:
            log.exception("the end of the run could not be reported")
        finally:
            logging.shutdown()
            os._exit(code)

    def close_log(self) -> None:
        """Close the event log.

        Raises:
            EventLogError: It may not be durable.
        """
        if self.event_log is not None:
            self.event_log.close()

    def _claim_in_training_thread(self) -> None:
        if self._claim.locked() and self._owner == threading.get_ident():
            return  # `complete` failed, and `fail` says so
        if not self._claim.acquire(blocking=False):
            _wait_for_the_end()
        self._owner = threading.get_ident()

    def _stop_behind(self, error: BaseException) -> TrainingCanceled | None:
        """The stop as which a failure is reported that would not have been without it, or came after its checkpoint."""
        stop = stop_before(error)
        if stop is not None and stop is not error and self._has_checkpoint_of(self.step):
            log.error("after the run had stopped: %s", self._describe(error).text)
            return stop
        return stop_behind_lost_worker(error, self.stop.signals.reason) if stop is None else None

    def _has_checkpoint_of(self, step: int) -> bool:
        return self.checkpoints_dir is not None and (self.checkpoints_dir / f"{step_name(step)}.json").exists()

    def first_cause(self, own: Failure) -> Failure:
        """The failure to report: `own`, or an earlier one of another rank that caused it; asks once."""
        if not self.expects_ranks or self.rank_files is None or own.exit_code == EXIT_STOPPED:
            return own
        if self._cause_elsewhere is None:
            self._cause_elsewhere = first_cause(own, time.time(), self.rank_files, self.processes)
        is_own = self._cause_elsewhere.text == own.text
        return own if is_own else replace(self._cause_elsewhere, resumable=own.resumable)

    def _describe(self, error: BaseException) -> Failure:
        own = describe_failure(
            error,
            stage=self.stage,
            has_checkpoint=self.checkpoints_dir is not None and any(self.checkpoints_dir.glob("*.json")),
            secrets=self.secrets,
            environ=self.environ,
        )
        return replace(error.failure, resumable=own.resumable) if isinstance(error, FailedElsewhere) else own

    def _report(self, error: BaseException, failure: Failure) -> int:
        step = self.step
        self._log_end(error, failure)
        self._send_failed(failure, step)
        if self.lifecycle is not None:
            self.lifecycle.failed(step, failure.text, within_s=self._left_s())
        if self.event_log is not None:
            self.event_log.record_failure(failure, step)
        self._inform_ranks(failure.exit_code)
        return failure.exit_code

    def _log_end(self, error: BaseException, failure: Failure) -> None:
        """Log how the attempt ended, and as the last line what continues it."""
        newest = None if self.checkpoints_dir is None else _newest_record(self.checkpoints_dir)
        going_on = "" if newest is None else f" It goes on from {shown_path(newest)}."
        command = f"\n  {self.next_command}" if self.next_command else ""
        if isinstance(error, TrainingCanceled):
            log.warning("stopped: %s; %s.%s%s", error.reason, self.way_on(), going_on, command)
            return
        tracebacks = None if self.verbose or self.folder is None else self.folder / FAILURES_DIRECTORY
        log_failure(error, failure, secrets=self.secrets, environ=self.environ, tracebacks=tracebacks)
        if self.is_rank_zero and failure.category == "train-step" and self.step:
            log.error("it failed in step %d; to try again, %s.%s%s", self.step, self.way_on(), going_on, command)

    def _inform_ranks(self, exit_code: int) -> None:
        """Let the other ranks end, with this exit code; also removes what a rank of a killed attempt has left."""
        files = self.rank_files
        if files is not None:
            if self.expects_ranks or files.name_others():
                files.leave_exit_code(exit_code)
            files.clear()

    # uploads and the terminal message

    def _left_s(self) -> float:
        """Seconds until the deadline, which is counted from the first wait; some for a try where none are left."""
        now = time.monotonic()
        if self._end_by is None:
            self._end_by = now + self.deadline_s
        return max(self._end_by - now, min(LAST_TRY_S, self.deadline_s))

    def _settle(self) -> None:
        """Wait for the required uploads, as long as no stop is asked for."""
        if self.uploader is None:
            return

        def show(line: str) -> None:
            self.stop.raise_if_stopped()
            log.info("%s", line)

        error = self.uploader.settle(deadline_s=self._left_s(), progress=show)
        if error is not None:
            raise error

    def _send_completed(self, completion: Completion) -> None:
        if completion.was_reported:
            return
        final = None if completion.final_checkpoint is None else str(completion.final_checkpoint)
        error = self._deliver("completed", completion.step, final)
        if error is not None:
            raise error

    def _send_failed(self, failure: Failure, step: int) -> None:
        """Deliver what the run has left to deliver, and how it ended; what cannot be delivered stays in the queue."""
        if self.uploader is not None and not self._settled:  # else that was waited for already
            left = self.uploader.settle(deadline_s=self._left_s(), progress=log.info)
            if left is not None:
                log.error("uploads of the failed run: %s", left)
        error = self._deliver("failed", step, None, failure.text)
        if error is not None:
            log.error("the failure could not be reported: %s", error)

    def _deliver(
        self, status: Literal["completed", "failed"], step: int, final: str | None, failure: str = ""
    ) -> GenlightError | None:
        """Send the terminal message and wait until it is acknowledged; what went wrong, None where nothing did."""
        if self.uploader is None:
            return None
        return self.uploader.deliver_terminal(status, step, final, failure, deadline_s=self._left_s())


class FollowerSession(Session):
    """The session of another rank: it trains along, leaves every report to rank zero, and ends as that does."""

    is_rank_zero = False

    _rank_zero: RankZero | None = None

    @override
    def place(self, folder: Path | None, checkpoints_dir: Path | None) -> None:
        super().place(folder, checkpoints_dir)
        if folder is not None and self.rank_files is not None:
            self._rank_zero = RankZero(folder)
            if not self._rank_zero.started_this_process:  # else it sees the process
                self.hold(self.rank_files.present(this_rank()))
            self.hold(self.watch.looking(self._rank_zero.check, paused_ranks(self._rank_zero.processes, self.stop)))

    @override
    def complete(self, completion: Completion | None = None) -> int:
        self.watch.close()
        if self.stop.run_state is None:  # there was nothing to train
            return EXIT_COMPLETED
        code, gone = self._exit_code_of_rank_zero()
        # Where it was killed after this rank had trained, the run is not known to be whole.
        return code if code is not None else EXIT_FAILED if gone else EXIT_COMPLETED

    @override
    def fail(self, error: BaseException) -> int:
        self.watch.close()
        if not isinstance(error, TrainingCanceled):
            self.cause = error
        elif self.stop.is_agreed:
            code, _ = self._exit_code_of_rank_zero()
            return EXIT_STOPPED if code is None else code
        return self._report(error, self._describe(error))  # rank zero may not be there at all

    @override
    def _report(self, error: BaseException, failure: Failure) -> int:
        """Leave a record of what ended this rank, and stay until it was read."""
        files, rank_zero = self.rank_files, self._rank_zero
        if files is None or rank_zero is None:
            self._log_end(error, failure)
            return failure.exit_code
        if rank_zero.is_gone() and isinstance(error, RankFailedError):
            log.error("%s", error)
            code = files.exit_code()
            return EXIT_FAILED if code is None else code
        self._log_end(error, failure)
        if not rank_zero.has_exited():  # else the next attempt would take this for a failure of its own
            files.leave(this_rank(), failure)
            if self.reports_at_once:
                rank_zero.wait_for_end(files, within_s=ACKNOWLEDGED_WITHIN_S, at_most_s=ACKNOWLEDGED_WITHIN_S)
        return failure.exit_code

    def _exit_code_of_rank_zero(self) -> tuple[int | None, bool]:
        """Wait for rank zero, which still settles and reports; its exit code, and whether it is known to be gone."""
        exit_on_signal(EXIT_STOPPED)  # this rank is done, and the next start finds what rank zero has left
        if self._rank_zero is None or self.rank_files is None:
            return None, False
        code = self._rank_zero.wait_for_end(self.rank_files, within_s=self.deadline_s + REPORTED_WITHIN_S)
        return code, bool(self._rank_zero.is_gone())


def _newest_record(directory: Path) -> Path | None:
    """The record of the newest checkpoint, by its name alone."""
    records = [path for path in record_paths(directory) if is_record_of_callback(path)]
    return max(records, key=lambda path: step_of_name(path.stem) or 0, default=None)


def _wait_for_the_end() -> NoReturn:
    """Another thread is reporting, and ends the process then."""
    while True:
        time.sleep(3600)
