"""A session: the resources of one attempt to train, and the report of its end.

``genlight run`` and ``genlight fit`` each open one. It holds the stop sources of the attempt, its event log, its
uploads, the watch over the other ranks and the progress. The callbacks and loggers of the fit get it once, by
``join_run``. However the attempt ends, `Session.complete`, `Session.fail` or `Session.end_now` reports it once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, Self

from typing_extensions import override

from ...callbacks.checkpoint.format.record import FINAL_NAME, step_name
from ...callbacks.checkpoint.selection import newest_complete
from ...callbacks.stop.signals import exit_on_signal
from ...callbacks.stop.sources import StopSources, cancel_file_is_set
from ...reporters.events.event import Failed
from ..cluster.job_context import this_rank
from ..contract.exceptions import (
    EventLogError,
    FailureCategory,
    GenlightError,
    RankFailedError,
    TrainingCanceled,
    UploadError,
)
from ..plumbing.failures import (
    EXIT_COMPLETED,
    EXIT_FAILED,
    EXIT_NONFINITE,
    EXIT_STOPPED,
    Failure,
    describe_failure,
    error_to_report,
    safe_text,
    stop_reason,
)
from ..plumbing.redaction import traceback_of
from .attempts import Attempt, last_attempts
from .deaths import RepeatedDeathError, begin_attempt, note_end
from .folder import STOP_NAME, withdraw_stop
from .rank_files import RankFiles
from .ranks import FailedElsewhere, RankProcesses, RankWatch, RankZero, first_cause, paused_ranks
from .report import log_failure, shown_path
from .start import Start

if TYPE_CHECKING:
    from ...callbacks.checkpoint.format.record import CheckpointRecord, RecordMeta
    from ...reporters.events.event_log import EventLog
    from ...reporters.uploads import Uploader
    from .control_plane import Lease


log = logging.getLogger(__name__)

LAST_TRY_S = 5.0
"""Seconds for one try of the terminal message if the uploads before it used up the deadline."""
REPORTED_WITHIN_S = 60.0
"""Seconds beyond the upload deadline for which another rank waits for rank zero's exit code."""
STOPPED_AGAIN = (
    "The previous attempt was also stopped before its first step, and the next one would be, too. Allow the run more "
    "time, or remove the cause of the stop."
)
FAILS_AGAIN = " The same start would fail there again: correct its cause first."
ACKNOWLEDGED_WITHIN_S = 15.0
"""How long a failed rank waits for rank zero to read the cause: when one rank exits, a launcher ends the others."""


@dataclass(frozen=True)
class Completion:
    """The outcome of a run that completed."""

    step: int
    final_checkpoint: Path | None
    stopped: str | None = None
    finite: bool = True
    """False if a weight of the final checkpoint is known to be nan or infinite."""
    was_reported: bool = False
    """Whether an older runtime ended the run and has sent the terminal message."""

    @classmethod
    def of_record(cls, record: CheckpointRecord | None, step: int, stopped: str | None = None) -> Self:
        """Return the outcome of a run with the final checkpoint `record`, which is None if the run saved none.

        `final_checkpoint` is the path that the trainer's hook reported, otherwise the path of the record.
        """
        if record is None:
            return cls(step, None, stopped)
        is_finite, was_reported = record.finite_weights is not False, record.is_old and record.name == FINAL_NAME
        return cls(step, record.reported_path, stopped, finite=is_finite, was_reported=was_reported)

    def __str__(self) -> str:
        stopped = f" ({self.stopped})" if self.stopped else ""
        weights = "" if self.finite else ", but its final weights are not finite (nan or infinite)"
        return f"completed at step {self.step}{stopped}{weights}"


@dataclass(kw_only=True, eq=False)
class Session:
    """The session of rank zero. It writes the one terminal event of the attempt, the last line of the log.

    First the required uploads settle, then the terminal message is acknowledged, then the event records the outcome.
    The training thread ends an attempt by `complete` or `fail`. A watching thread uses `end_now`, because the training
    thread may hang forever.

    All of this shares one deadline. A stop ends the wait for uploads of a run that was about to complete. The wait for
    the terminal message continues until the deadline: the message may have arrived, and an event with another outcome
    would contradict it. To free a machine sooner, set a shorter deadline, or send a second signal.

    If a run fails while it is being stopped, the report is the stop if the checkpoint of the stop is durable or the
    signal itself caused the failure. Otherwise the report is the failure.

    The session is a context manager: on exit it closes uploads and log, then the contexts in `holds`, the last first.
    """

    stop: StopSources
    """The sources of stop requests."""
    secrets: Sequence[str | None] = ()
    """Texts that no report may show."""
    environ: Mapping[str, str] | None = None
    """Environment whose values no report may show; None takes the process's own."""
    deadline_s: float = 60.0
    """Seconds for which the end of the attempt waits for uploads and messages."""
    resume_hint: str = "Start it again to continue."
    """How a user continues after a stop or a failure."""
    requires_uploads: bool = True
    """Whether an attempt fails if it completes but a required upload did not arrive."""
    preparing: FailureCategory = "model-load"
    """The part of the start that is being prepared, or was prepared last."""
    folder: Path | None = None
    """Folder of the attempt for tracebacks and for the files of the ranks; None if it has none."""
    checkpoints_dir: Path | None = None
    """Folder of its checkpoints; None if it saves nothing from which a later attempt can continue."""
    rank_files: RankFiles | None = None
    """The files by which ranks inform each other."""
    event_log: EventLog | None = None
    """The open log of this attempt; None on other ranks, and for a fit without an `EventLogger`."""
    uploader: Uploader | None = None
    lease: Lease | None = None
    """The claim on the run at a control plane."""
    is_supervised: bool = False
    """Whether a supervisor on this machine starts the run again after a rank was killed."""
    start: Start | None = None
    """How the attempt starts; None until `begin` is called. From then on, `deaths.py` counts it if it is killed."""
    job: str = ""
    """Digest of the job."""
    record: RecordMeta | None = None
    """Metadata of the run for every checkpoint record; None leaves it to the `Checkpoint` callback."""
    count_steps: Callable[[], int] = lambda: 0
    """Returns the step in progress if there is one, otherwise the number of completed steps."""
    has_other_checkpoint: Callable[[], bool] = lambda: False
    """Returns whether a restart finds a checkpoint outside of `checkpoints_dir`."""
    explain_further: Callable[[Exception], GenlightError | None] = lambda _: None
    """See `error_to_report`."""
    refuse: Callable[[Exception], GenlightError | None] | None = None
    """See `error_to_report`; used only until the first step has begun."""
    processes: RankProcesses | None = None
    """Processes of other ranks that this rank started or whose deaths a supervisor reports to it; None before the fit,
    and without other ranks."""
    before_report: list[Callable[[], None]] = field(default_factory=list)
    """Called before `end_now` reports: the reports that the training thread would have made first."""
    before_exit: list[Callable[[], None]] = field(default_factory=list)
    """Called before `end_now` ends the process."""
    cause: BaseException | None = None
    """The reported error that ended the attempt; None if it completed."""
    holds: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Contexts that `__exit__` leaves, after it has closed uploads and log."""

    only_prints: bool = False
    """Whether the end is reported only on standard error: not in the log and not to an orchestrator."""

    is_rank_zero = True

    def __post_init__(self) -> None:
        self.watch = RankWatch(self.end_now)
        self._reporting = threading.RLock()  # the reporting thread takes it once and keeps it
        self._end_by: float | None = None
        """The deadline, by ``time.monotonic``; None until the first wait."""
        self._completes = False
        """Whether `complete` was called with an outcome."""
        self._is_idle = False
        """Whether a stop ended the attempt before it had trained a step."""
        self._ends_again = False
        """Whether another attempt would end in the same way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()
        with self.holds:
            if self.uploader is not None:
                self.uploader.close()
            try:
                if self.event_log is not None:
                    self.event_log.close()
            except EventLogError as error:
                log.error("the event log may not be durable: %s", error)  # noqa: TRY400 - its message is complete

    def place(self, folder: Path | None, checkpoints_dir: Path | None) -> None:
        """Set `folder` and `checkpoints_dir` of the attempt."""
        self.folder, self.checkpoints_dir = folder, checkpoints_dir
        if folder is None:
            return
        self.rank_files = RankFiles(folder)
        if self.is_rank_zero:
            withdraw_stop(folder)  # a stop request that is already in the folder was meant for an earlier attempt
            self.stop.cancel_files.append(folder / STOP_NAME)
            self.stop.add_check(self.rank_files.stop_reason)

    def begin(self, start: Start, job: str) -> None:
        """Note that the attempt begins from `start`. From now on, `deaths.py` counts it if it is killed."""
        self.start, self.job = start, job
        if self.is_rank_zero and self.folder is not None:
            record = 0 if start.record is None else start.record.step
            begin_attempt(self.folder, record, start.deaths, job=job, went_back=start.went_back, held=self.holds)

    @property
    def step(self) -> int:
        """The step in progress, or else the last completed one; 0 before the first."""
        return self.count_steps()

    @property
    def stage(self) -> FailureCategory:
        """Current stage: the category of a failure whose type does not imply one."""
        has_started = self.step > 0 if self.event_log is None else self.event_log.phase != "new"
        return "train-step" if has_started else self.preparing

    # The end

    def complete(self, completion: Completion | None = None) -> int:
        """Report that the attempt completed, and return the exit code.

        Args:
            completion: The outcome; None if nothing was trained.

        Raises:
            UploadError: A required upload did not arrive by the deadline; nothing was reported.
            EventLogError: The log was removed while the attempt ran; nothing was reported.
            TrainingCanceled: A stop was requested first; nothing was reported.
        """
        self._reporting.acquire()
        if completion is not None:
            self._completes = True
            if self.event_log is not None and not self.event_log.is_in_place:
                raise EventLogError(
                    f"{shown_path(self.event_log.path)} was removed or replaced while the run wrote it, so its history "
                    "is lost. If its checkpoints still exist, start it again with resume_from_latest"
                )
            final = None if completion.final_checkpoint is None else str(completion.final_checkpoint)
            send = functools.partial(self._send_end, "completed", completion.step, final)
            if self.uploader is not None:
                self.stop.signals.what_next = "the run ends without waiting for the rest of its uploads"
            for undelivered in self._deliver(None if completion.was_reported else send, self._show_unless_stopped):
                if self.requires_uploads:
                    raise undelivered
                log.error("%s", undelivered)
            if self.lease is not None:
                self.lease.completed(completion.step, final, within_s=self._left_s())
            if self.event_log is not None:
                try:
                    self.event_log.completed(
                        step=completion.step,
                        final_checkpoint=completion.final_checkpoint,
                        stopped=completion.stopped,
                        finite=completion.finite,
                    )
                    self.event_log.close()
                except EventLogError as error:
                    self.cause = error
                    log.error("the completed run could not be recorded: %s", error)  # noqa: TRY400
                    return self._fix_exit_code(EXIT_FAILED)
        self._inform_ranks(EXIT_COMPLETED)
        return self._fix_exit_code(EXIT_COMPLETED)

    def _fix_exit_code(self, exit_code: int) -> int:
        """Make sure that later signals do not change the reported exit code, and return it."""
        self.stop.signals.exit_code = exit_code
        return exit_code

    def fail(self, error: BaseException) -> int:
        """Report the error that ended the attempt, and return the exit code. Raises nothing."""
        self._reporting.acquire()
        try:
            error = self.cause = self.explain(error)
            own = self._without_false_hope(self._describe(error))
            first = own if isinstance(error, FailedElsewhere) else self._first_cause(own)
            if first != own:
                error = self.cause = FailedElsewhere(first)
            if self.start is not None and self.folder is not None and not self.only_prints:
                note_end(self.folder, first.text)
            return self._fix_exit_code(self._report(error, first))
        except BaseException as problem:  # noqa: BLE001 - no other code reports this attempt
            self.cause = problem
            log.error("the end of the run could not be reported: %s", traceback_of(problem))  # noqa: TRY400
            if self.event_log is not None and self.event_log.phase != "ended" and not self.only_prints:
                text = "the end of the run could not be reported"
                self.event_log.record_failure(Failure("train-step", text, resumable=False, exit_code=EXIT_FAILED), 0)
            return EXIT_FAILED

    def end_now(self, error: BaseException) -> NoReturn:
        """Report the error that ended the attempt and end this process, whatever the training thread does.

        Never returns. If another thread is already reporting, this call blocks and that thread ends the process;
        otherwise the caller could end it in the middle of the report.
        """
        self._reporting.acquire()
        code = EXIT_FAILED
        try:
            for report in self.before_report:
                _try(report)
            code = self.fail(error)
            for act in self.before_exit:
                _try(act)
            logging.shutdown()
        finally:
            os._exit(code)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to report in place of `error`; see `error_to_report`. Raises nothing."""
        folder = self.checkpoints_dir
        try:
            better = error_to_report(
                error,
                signalled=self.stop.signals.reason,
                is_saved=folder is not None and (folder / f"{step_name(self.step)}.json").exists(),
                explain_further=self.explain_further,
                refuse=self.refuse if self.step == 0 else None,
            )
        except Exception:
            log.exception("the error that ended the run could not be explained")
            return error
        if stop_reason(better) and not stop_reason(error):
            text = safe_text(error, secrets=self.secrets, environ=self.environ)
            log.error("the stop is reported instead of this failure, which followed it: %s", text)
        return better

    def _first_cause(self, own: Failure) -> Failure:
        """Return the failure to report: `own`, or an earlier failure of another rank that caused it."""
        if self.processes is None or self.rank_files is None or own.exit_code == EXIT_STOPPED:
            return own
        return first_cause(own, time.time(), self.rank_files, self.processes)

    def _describe(self, error: BaseException) -> Failure:
        """Describe a failure of this attempt, and whether a checkpoint makes it resumable."""
        saved = None if self.checkpoints_dir is None else newest_complete(self.checkpoints_dir) is not None
        dies_again = isinstance(error, RepeatedDeathError)
        own = describe_failure(
            error,
            stage="train-step" if dies_again else self.stage,
            has_checkpoint=not dies_again and (bool(saved) or self.has_other_checkpoint()),
            lost_steps=saved is None and self.step > 0,
            secrets=self.secrets,
            environ=self.environ,
        )
        return replace(error.failure, resumable=own.resumable) if isinstance(error, FailedElsewhere) else own

    def _without_false_hope(self, failure: Failure) -> Failure:
        """Return `failure`, but not as resumable if the attempt before ended in the same way: so would the next one.

        A stop before the first step also gets another exit code: a scheduler would restart such a run forever.
        """
        log, before, last = self.event_log, Attempt(), Attempt()
        if log is not None and failure.exit_code in (EXIT_STOPPED, EXIT_FAILED):
            before, last = last_attempts(log.path, log.run_id)
            if log.phase == "new":  # this attempt is not in the log yet
                before, last = last, Attempt()
        if failure.exit_code == EXIT_STOPPED:
            self._is_idle = not self._completes and self.step in (0, last.resumed_from)
            self._ends_again = self._is_idle and before.is_stopped_at_its_start()
            return replace(failure, resumable=False, exit_code=EXIT_FAILED) if self._ends_again else failure
        is_same = isinstance(before.end, Failed) and (before.end.step, before.end.error) == (self.step, failure.text)
        self._ends_again = failure.category == "train-step" and (is_same or failure.exit_code == EXIT_NONFINITE)
        return replace(failure, resumable=False) if is_same and self._ends_again else failure

    def _report(self, error: BaseException, failure: Failure) -> int:
        """Log, send and record the failure, let the other ranks end, and return the exit code."""
        step = self.step
        self._log_end(error, failure)
        if self.only_prints:
            self._inform_ranks(failure.exit_code)
            return failure.exit_code
        send = functools.partial(self._send_end, "failed", step, None, failure.text)
        for undelivered in self._deliver(send, log.info):
            log.error("for the failed run: %s", undelivered)
        if self.lease is not None:
            self.lease.failed(step, failure.text, within_s=self._left_s())
        if self.event_log is not None:
            self.event_log.record_failure(failure, step)
        self._inform_ranks(failure.exit_code)
        return failure.exit_code

    def _log_end(self, error: BaseException, failure: Failure) -> None:
        """Log how the attempt ended, with the way to continue it as the last line."""
        if isinstance(error, TrainingCanceled):
            # Otherwise every later start would stop at once without saying why.
            remaining = [path for path in self.stop.cancel_files if path.name != STOP_NAME and cancel_file_is_set(path)]
            first = "".join(f" Remove the cancel file {path} first." for path in remaining)
            idle = " No step was trained." if self._is_idle else ""
            if self._ends_again:
                log.error("stopped: %s.%s %s%s", error.reason, idle, STOPPED_AGAIN, first)
            else:
                log.warning("stopped: %s.%s%s%s %s", error.reason, idle, self._next_start(), first, self.resume_hint)
            return
        log_failure(error, failure, secrets=self.secrets, environ=self.environ, folder=self.folder)
        if self.is_rank_zero and failure.category == "train-step" and self.step:
            hint = FAILS_AGAIN if self._ends_again else f"{self._next_start()} {self.resume_hint}"
            log.error("it failed in step %d.%s", self.step, hint)

    def _next_start(self) -> str:
        """Return a sentence with the checkpoint from which the next start continues; empty if there is none."""
        newest = None if self.checkpoints_dir is None else newest_complete(self.checkpoints_dir)
        return "" if newest is None else f" The next start continues from {shown_path(newest.path)}."

    def _inform_ranks(self, exit_code: int) -> None:
        """Let the other ranks end with this exit code, and remove all rank files, even those of killed attempts."""
        files = self.rank_files
        if files is not None:
            if self.processes is not None or files.folder.exists():
                files.leave_exit_code(exit_code)
            files.clear()

    def _left_s(self) -> float:
        """Return the seconds until the deadline, counted from the first wait; at least `LAST_TRY_S` for one try.

        After a stop signal, the time at which a launcher kills its ranks is an earlier deadline.
        """
        now = time.monotonic()
        if self._end_by is None:
            self._end_by = now + self.deadline_s
        end_by, killed_at = self._end_by, self.stop.signals.killed_at
        if killed_at is not None:
            end_by = min(end_by, killed_at - LAST_TRY_S)
        return max(end_by - now, min(LAST_TRY_S, self.deadline_s))

    def _deliver(
        self, send: Callable[[], UploadError | None] | None, show: Callable[[str], None]
    ) -> Iterator[UploadError]:
        """Wait for the required uploads, then `send` the terminal message. Yield an error for each that failed."""
        if self.uploader is None:
            return
        is_first_wait = self._end_by is None  # otherwise `complete` has already waited for the uploads
        if is_first_wait and (error := self.uploader.settle(deadline_s=self._left_s(), progress=show)):
            yield error
        if send is not None and (error := send()):
            yield error

    def _send_end(
        self, status: Literal["completed", "failed"], step: int, final: str | None, failure: str = ""
    ) -> UploadError | None:
        """Send the terminal message, and return the error if it was not acknowledged."""
        assert self.uploader is not None
        return self.uploader.deliver_terminal(status, step, final, failure, deadline_s=self._left_s())

    def _show_unless_stopped(self, line: str) -> None:
        self.stop.raise_if_stopped()
        log.info("%s", line)


class FollowerSession(Session):
    """The session of another rank: it leaves every report to rank zero, and ends with rank zero's exit code."""

    is_rank_zero = False

    _rank_zero: RankZero | None = None

    @override
    def place(self, folder: Path | None, checkpoints_dir: Path | None) -> None:
        super().place(folder, checkpoints_dir)
        if folder is not None and self.rank_files is not None:
            rank_zero = self._rank_zero = RankZero(folder, self.rank_files)
            self.holds.enter_context(self.rank_files.present(this_rank()))
            self.holds.enter_context(self.watch.looking(rank_zero.check, paused_ranks(rank_zero.processes, self.stop)))

    @override
    def complete(self, completion: Completion | None = None) -> int:
        self.watch.close()
        if self.stop.run_state is None:  # nothing was trained
            return EXIT_COMPLETED
        code = self._exit_code_of_rank_zero()
        if code is None:  # If rank zero was killed after this rank had trained, the run may not be complete.
            code = EXIT_FAILED if self._rank_zero is not None and self._rank_zero.is_gone() else EXIT_COMPLETED
        return self._fix_exit_code(code)

    @override
    def fail(self, error: BaseException) -> int:
        self.watch.close()
        error = self.explain(error)
        if not isinstance(error, TrainingCanceled):
            self.cause = error
        elif self.stop.is_agreed:
            code = self._exit_code_of_rank_zero()
            return self._fix_exit_code(EXIT_STOPPED if code is None else code)
        # A stop on which the ranks did not agree came early: rank zero may not exist, so this rank reports it itself.
        return self._fix_exit_code(self._report(error, self._describe(error)))

    @override
    def _report(self, error: BaseException, failure: Failure) -> int:
        """Leave a record of the failure of this rank, and wait until rank zero has read it."""
        rank_zero = self._rank_zero
        if rank_zero is not None and rank_zero.is_gone() and isinstance(error, RankFailedError):
            log.error("%s", error)
            code = rank_zero.files.exit_code()
            return EXIT_FAILED if code is None else code
        self._log_end(error, failure)
        if rank_zero is not None and not rank_zero.is_gone():  # otherwise the next attempt would read the record
            rank_zero.files.record(this_rank(), failure)
            code = rank_zero.wait_for_end(within_s=ACKNOWLEDGED_WITHIN_S, is_bounded=True)
            if code is not None and failure.exit_code == EXIT_STOPPED:  # rank zero knows whether a restart would help
                return code
        return failure.exit_code

    def _exit_code_of_rank_zero(self) -> int | None:
        """Return the exit code of rank zero, after it has settled and reported; None if it left none."""
        exit_on_signal(EXIT_STOPPED)  # nothing is lost: this rank is done, and the next start reads rank zero's files
        within_s = self.deadline_s + REPORTED_WITHIN_S
        code = None if self._rank_zero is None else self._rank_zero.wait_for_end(within_s=within_s)
        exit_on_signal(EXIT_STOPPED if code is None else code)
        return code


def _try(act: Callable[[], None]) -> None:
    """Call one part of the end. Log its error, so that the other parts still run."""
    try:
        act()
    except Exception:
        log.exception("not all of the end of the run could be reported")
