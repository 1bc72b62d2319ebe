"""The event log of a run: ``trainer_event.v1``, one JSON object a line.

An `EventLog` writes one attempt of one run. It knows the rules of the format and refuses what would break them, so a
log that was written through it always passes ``genlight events FILE --check``.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgspec

from ...adapter.contract.exceptions import EventLogError, FailureCategory, StopReason, ThreadLimitError
from ...adapter.plumbing.failures import Failure
from ...adapter.plumbing.threads import started
from .attempt import Attempt, Phase
from .event import (
    MAX_STEP,
    RESUMED_METRIC,
    ROLLED_BACK_METRIC,
    STOP_REASONS,
    Checkpoint,
    Completed,
    Event,
    Failed,
    Sample,
    Started,
    checked_step,
    checked_text,
    encode_event,
    error_text,
    finite_float,
    metric_lines,
    path_text,
    timestamp_ms,
)
from .jsonl_file import LineFile
from .reader import count_started, last_seq

__all__ = ["EventLog"]

log = logging.getLogger(__name__)

MOST_WAITING = 256
"""How many calls of `metrics` may wait to reach the file, for steps so short that many fit into `flush_every_s`."""

SYNC_EVERY_S = 1.0
"""How long a power cut may take lines that no caller waited for: a sync costs 0.2 ms of CPU, and a shared disk more."""

_open_logs: weakref.WeakSet[EventLog] = weakref.WeakSet()


class EventLog:
    """Writes the events of one attempt; conforms to `TrainingReporter`.

    The order is ``started``, any number of ``metric``, ``checkpoint`` and ``sample``, then one ``completed`` or
    ``failed``, which ends the attempt. ``failed`` may also come first, from an attempt that never started. ``started``,
    ``checkpoint``, ``completed`` and ``failed`` are durable when the call returns, together with all lines before them.
    Metrics and samples become durable within about a second. A power cut therefore loses only events that a run reports
    again when it resumes from a durable checkpoint. Lines are written in the order of the calls. If ``metrics`` is
    called more than once within `flush_every_s`, its lines are held back until that time is over, 256 calls have been
    made, or another event comes; a killed process loses no more than those.

    Any thread may call these methods, and no thread waits for another thread's disk writes. In a forked child the log
    is closed, and so is a copy of it.

    Attributes:
        run_id: Whose events these are.
        attempt: Which attempt of the run this is, from 1: one more than the ``started`` lines of the run in the file.
        last_checkpoint: The checkpoint that this attempt reported last.

    Args:
        path: The file, continued when it exists: a torn last line is cut off and `seq` goes on from the last whole
            one; the first line of a file has `seq` 1. A file may hold several runs, one after the other.
        run_id: Whose events these are. Empty only where the run failed before its identity was known; then
            ``failed`` is the only event it can have.
        flush_every_s: See above; in seconds.
        clock: Nanoseconds since the epoch.

    Raises:
        EventLogError: Another process writes the file, it cannot be opened, or it is not an event log.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run_id: str,
        flush_every_s: float = 0.05,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        _check_run_id(run_id)
        self.run_id = run_id
        self.last_checkpoint: str | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[tuple[dict[str, Any], int, int]] = deque()
        """Values, step and time of what is not in the file yet; it becomes lines on the way there."""
        self._is_due = True
        """Whether the next call of `metrics` is to write, rather than to let its lines wait."""
        self._flush_every_s = flush_every_s
        self._thread: threading.Thread | None = None
        self._lacks_thread = False
        self._is_awake = False
        # Not an Event: an interrupt inside of its `set` can leave its lock held for ever.
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Tells the thread that there is something to do (False), and about the end (True)."""
        self._is_unsynced = False
        self._error: EventLogError | None = None
        """The error of the thread; the next event raises it."""
        self._file = LineFile(path)
        try:
            self._last_seq_found = last_seq(self._file.last_line, self._file.path)
            self.attempt = 1 + count_started(self._file.path, run_id)
        except BaseException:
            self._file.close()
            raise
        self._rules = Attempt(run_id)
        _open_logs.add(self)

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = {"_lock", "_wakeups", "_thread"}
        kept = {name: value for name, value in vars(self).items() if name not in of_this_process}
        return {**kept, "_waiting": deque(), "_is_unsynced": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _wakeups=queue.SimpleQueue(), _thread=None)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def seq(self) -> int:
        """`seq` of the last line of the file; 0 while it is empty."""
        return self._last_seq_found + self._file.lines

    @property
    def phase(self) -> Phase:
        """How far the attempt is: ``new`` before ``started``, ``ended`` once the terminal event is written."""
        return self._rules.phase

    @property
    def closed(self) -> bool:
        """Whether the file was given up; always so in a forked child."""
        return self._file.closed

    def takes_metrics_of(self, step: int) -> bool:
        """Whether `metric` would accept that step: none may follow a checkpoint of its step."""
        return step not in self._rules.checkpointed

    def started(self, *, run_id: str | None = None, metadata: Mapping[str, Any] | None = None) -> None:
        """Training begins.

        Args:
            run_id: May repeat the run of this log, as a `TrainingReporter` is told it.
            metadata: How the attempt came to be, as `run_metadata` says it; without secrets.

        Raises:
            EventLogError: The attempt began before, the run is unknown, or the line could not be written.
        """
        if not self.run_id or run_id not in {None, self.run_id}:
            raise EventLogError(f"run {run_id!r} cannot start in the event log of run {self.run_id!r}: {self.path}")
        attempt = self.attempt if self.attempt > 1 else msgspec.UNSET
        self._write(Started, attempt=attempt, metadata=dict(metadata) if metadata else msgspec.UNSET)
        self._sync()

    def metric(self, *, name: str, value: Any, step: int) -> None:
        """One scalar: a number, a numpy scalar or a tensor of one element, which is read from its device.

        In the file when this returns.

        Raises:
            TypeError: The value is not one real number, the name is not a string, or the step is not an integer.
            ValueError: The name is empty, the step negative, or an integer value beyond the range of a float.
            EventLogError: The attempt has not started or is over, a checkpoint of this step was reported before, or
                the line could not be written.
        """
        self.metrics({name: value}, step=step)
        self.flush()

    def metrics(self, values: Mapping[str, Any], *, step: int) -> None:
        """Scalars of one step, a line for each, in their order; none where one of them is refused.

        Raises as `metric` does; what could not be written may also be raised by the next event.
        """
        # On the path of every step of some runs: what is plain is not handed on to be checked.
        if type(step) is not int or step < 0 or step > MAX_STEP:
            step = checked_step(step)
        for name, value in values.items():
            if type(name) is not str or not name or type(value) is not float or value - value != 0.0:  # not finite
                taken = {checked_text("name", name): finite_float(name, value) for name, value in values.items()}
                break
        else:
            taken = dict(values)
        rules = self._rules
        if (
            rules.phase != "started"
            or step in rules.checkpointed
            or RESUMED_METRIC in taken
            or ROLLED_BACK_METRIC in taken
        ):
            self._apply_rules(taken, step)
        # Without the lock, which would cost a step 2 µs: `_take_waiting` meets what changes after the looks above.
        self._waiting.append((taken, step, self._clock()))
        if self._file.closed:
            raise self._refusal("metric", self._closed())
        if self._is_due or len(self._waiting) >= MOST_WAITING:
            with self._lock:
                self._write_waiting()
        elif not self._is_awake:
            with self._lock:
                if not self._wake():
                    self._write_waiting()

    def flush(self) -> None:
        """Bring to the file what waits.

        Raises:
            EventLogError: It could not be written.
        """
        if self._file.closed:  # before the lock is taken, as in `_write`
            return
        with self._lock:
            self._write_waiting()

    def checkpoint(self, *, path: str | os.PathLike[str], step: int) -> None:
        """A checkpoint is durable; from now on the log takes no further metric of its step.

        Raises:
            TypeError: `path` is not a path, or `step` is not an integer.
            ValueError: `path` is empty, or `step` negative.
            EventLogError: The attempt has not started or is over, or the line could not be written.
        """
        text = path_text("path", path)
        self._write(Checkpoint, path=text, step=checked_step(step))
        self.last_checkpoint = text
        self._sync()

    def sample(self, *, path: str | os.PathLike[str], step: int) -> None:
        """A sample was written; raises as `checkpoint` does."""
        self._write(Sample, path=path_text("path", path), step=checked_step(step))

    def completed(
        self,
        *,
        step: int,
        final_checkpoint: str | os.PathLike[str] | None,
        stopped: str | None = None,
        finite: bool = True,
    ) -> None:
        """The attempt ended as planned.

        Args:
            step: Completed steps.
            final_checkpoint: Where the final artifact is; None when there is none.
            stopped: What ended it before its last step, such as ``should_stop`` or ``data_exhausted``.
            finite: False where a weight is known to be nan or infinite.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: `step` is negative, or a string empty.
            EventLogError: The attempt has not started or is over, or the line could not be written.
        """
        step = checked_step(step)
        final = None if final_checkpoint is None else path_text("final_checkpoint", final_checkpoint)
        reason = msgspec.UNSET if stopped is None else checked_text("stopped", stopped)
        known = msgspec.UNSET if finite else False
        self._write(Completed, step=step, final_checkpoint=final, stopped=reason, finite=known)
        self._sync()

    def failed(
        self, *, step: int, error: str, category: FailureCategory | StopReason | None = None, resumable: bool = False
    ) -> None:
        """The attempt ended by an exception or a stop; may come before ``started``.

        Args:
            step: The step that was being executed, else the completed steps.
            error: Text without secrets, which the line begins with ``category:`` where it does not yet; of a stop,
                its reason.
            category: None takes an `error` that is a stop reason for that stop, and any other for ``train-step``.
            resumable: Whether a restart can be expected to go on where this attempt ended.

        Raises:
            TypeError: `step` is not an integer.
            ValueError: `step` is negative, `category` unknown, or `error` not the reason of the stop.
            EventLogError: The attempt is over, or the line could not be written.
        """
        step = checked_step(step)
        if category is None:
            category = cast("StopReason", error) if error in STOP_REASONS else "train-step"
        text = error_text(error, category)
        self._write(Failed, step=step, error=text, category=category, resumable=bool(resumable))
        self._sync()

    def record_failure(self, failure: Failure, step: int) -> None:
        """As `failed`; a log that cannot be written must not hide what went wrong, so that is only logged."""
        try:
            self.failed(step=step, error=failure.text, category=failure.category, resumable=failure.resumable)
        except (EventLogError, OSError) as problem:
            log.error("the failure could not be recorded: %s", problem)  # noqa: TRY400

    def is_canceled(self) -> bool:
        """False: a log never asks for a stop."""
        return False

    def close(self) -> None:
        """Make every line durable and give up the file; an attempt without terminal event reads as killed."""
        if self._file.closed:
            return
        with self._lock:
            try:
                self._write_waiting()
            finally:
                self._give_up_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_up_file(self) -> None:
        self._wakeups.put(True)
        if self._thread is not None:
            self._thread.join()
        try:
            if self._is_unsynced:
                self._sync()
        finally:
            self._file.close()

    def _write(self, kind: type[Event], **fields: Any) -> None:
        """Write an event other than a metric, after what waits.

        An interrupt leaves the event written and the phase changed, or neither.
        """
        name = kind.__name__.lower()
        # Before the lock is taken: another thread may have held it when this process was forked off.
        if self._file.closed:
            raise self._refusal(name, self._closed())
        with self._lock:
            now = timestamp_ms(self._clock())
            event = kind(run_id=self.run_id, seq=self.seq + 1, timestamp_ms=now, **fields)
            fault = self._rules.fault(event)
            if fault is not None:
                raise self._refusal(name, fault[1])
            self._write_waiting()
            event.seq = self.seq + 1
            phase, lines = self._rules.phase, self._file.lines
            try:
                self._rules.take(event)
                self._append(encode_event(event))
            except BaseException:
                if self._file.lines == lines:
                    self._rules.phase = phase
                raise

    def _apply_rules(self, values: Mapping[str, float | str], step: int) -> None:
        """Refuse metrics that may not come now, and note what they say of the attempt."""
        if self._rules.phase != "started":
            why = "has not started" if self._rules.phase == "new" else "already has its terminal event"
            raise self._refusal("metric", f"the attempt {why}")
        for name, value in values.items():
            fault = self._rules.metric_fault(name, value, step)
            if fault is not None:
                raise self._refusal("metric", fault[1])
        for name, value in values.items():
            self._rules.take_metric(name, value)

    def _refusal(self, event: str, why: str) -> EventLogError:
        return EventLogError(f"cannot write {event!r} to {self.path}: {why}")

    def _closed(self) -> str:
        return f"the log is closed in process {os.getpid()}"

    def _write_waiting(self) -> None:
        """Write the lines that wait, under the lock; those of the next call wait again."""
        if self._waiting:
            self._is_due = False
            self._append(*metric_lines(self._take_waiting(), run_id=self.run_id, seq=self.seq + 1))

    def _take_waiting(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """The pending lines, without those that may no longer be written.

        Another thread can have reported a checkpoint of its step, or the end, between a look and a note in `metrics`.
        """
        for _ in range(len(self._waiting)):
            report = values, step, _ = self._waiting.popleft()
            if not self.takes_metrics_of(step) or self.phase != "started":
                log.warning("metrics %s of step %d came too late for %s", ", ".join(values), step, self.path)
            else:
                yield report

    def _append(self, *lines: bytes) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        try:
            self._file.append(*lines)
        finally:
            self._is_unsynced = True
        if not self._is_awake:
            self._wake()

    def _sync(self) -> None:
        self._is_unsynced = False  # first: a line that is written meanwhile is made durable once more
        self._file.sync()

    def _wake(self) -> bool:
        """Have the thread look after what waits and what is not durable; False where the system has no room for it."""
        if self._thread is None and not self._lacks_thread:
            thread = threading.Thread(target=self._look_after, name=f"flush {self.path.name}", daemon=True)
            try:
                self._thread = started(thread)
            except ThreadLimitError:
                self._lacks_thread = True
        if not self._lacks_thread:
            self._is_awake = True
            self._wakeups.put(False)
        return not self._lacks_thread

    def _look_after(self) -> None:
        """In the thread: every `flush_every_s` while there is something to do; asleep while there is not."""
        sync_at: float | None = None
        while not self._wakeups.get():
            is_busy = True
            while is_busy:
                try:
                    if self._wakeups.get(timeout=self._flush_every_s):
                        return
                except queue.Empty:
                    pass
                now = time.monotonic()
                try:
                    self._write_what_no_call_has_written()
                    if self._is_unsynced and sync_at is not None and now >= sync_at:
                        self._sync()
                except EventLogError as error:
                    self._error = error
                sync_at = (sync_at or now + SYNC_EVERY_S) if self._is_unsynced else None
                self._is_awake = False  # from here on a call wakes this thread
                is_busy = bool(self._waiting) or self._is_unsynced
                if is_busy:
                    self._is_awake = True

    def _write_what_no_call_has_written(self) -> None:
        """The thread that reports metrics should write them too, and this one only where no call has come for as long.

        Each write lets go of the interpreter's lock, and another thread would wait to get it back for every line.
        """
        if not self._waiting or not self._is_due:
            self._is_due = True
        elif self._lock.acquire(blocking=False):  # `close` holds it while it waits for this thread
            try:
                self._write_waiting()
            finally:
                self._is_due = True  # nothing waits any longer; where it failed, the next call is to hear of it
                self._lock.release()


def _check_run_id(run_id: Any) -> None:
    if not isinstance(run_id, str):
        raise TypeError(f"Invalid `run_id`. Expected a string, but received {run_id!r}.")
    try:
        run_id.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Invalid `run_id`. Expected a string that UTF-8 can hold, but received {run_id!r}."
        ) from error


def _flush_at_exit() -> None:
    """The last lines of a log that was not closed."""
    for event_log in list(_open_logs):
        event_log.flush()


atexit.register(_flush_at_exit)
