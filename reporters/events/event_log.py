"""The event log of a run: ``trainer_event.v1``, one JSON object a line.

An `EventLog` writes one attempt of one run. It knows the rules of the format and refuses what would break them, so a
log that was written through it always passes ``genlight events FILE --check``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgspec

from ...adapter.contract.exceptions import EventLogError, FailureCategory, StopReason
from .attempt import Attempt, Phase, check_run_id
from .jsonl_file import LineFile
from .lines import (
    MAX_STEP,
    RESUMED_METRIC,
    ROLLED_BACK_METRIC,
    SCHEMA_VERSION,
    STOP_REASONS,
    Artifact,
    Completed,
    Failed,
    Started,
    checked_step,
    checked_text,
    encode_line,
    error_text,
    finite_float,
    metric_lines,
    path_text,
    timestamp_ms,
)
from .reader import last_seq

__all__ = ["EventLog"]

log = logging.getLogger(__name__)

MOST_WAITING = 256
"""How many calls of `metrics` may wait to reach the file, for steps so short that many fit into `flush_every_s`."""

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
        check_run_id(run_id)
        self.run_id = run_id
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[tuple[dict[str, Any], int, int]] = deque()
        """Values, step and time of what is not in the file yet; it becomes lines on the way there."""
        self._is_due = True
        """Whether the next call of `metrics` is to write, rather than to let its lines wait."""
        self._file = LineFile(path, flush_every_s=flush_every_s, before_flush=self._hurry)
        try:
            self._last_seq_found = last_seq(self._file.last_line, self._file.path)
            self._attempt = Attempt(self._file.path, run_id)
        except BaseException:
            self._file.close()
            raise
        _open_logs.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"} | {"_waiting": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def attempt(self) -> int:
        """Which attempt of the run this is, from 1: one more than the ``started`` lines of the run that were there."""
        return self._attempt.number

    @property
    def seq(self) -> int:
        """`seq` of the last line of the file; 0 while it is empty."""
        return self._last_seq_found + self._file.lines

    @property
    def phase(self) -> Phase:
        """How far the attempt is: ``new`` before ``started``, ``ended`` once the terminal event is written."""
        return self._attempt.phase

    def takes_metrics_of(self, step: int) -> bool:
        """Whether `metric` would accept that step: none may follow a checkpoint of its step."""
        return step not in self._attempt.checkpointed

    @property
    def closed(self) -> bool:
        """Whether the file was given up; always so in a forked child."""
        return self._file.closed

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
        self._require_open("started")
        with self._lock:
            self._attempt.require("started", "new")
            attempt = self._attempt.number if self._attempt.number > 1 else msgspec.UNSET
            facts = dict(metadata) if metadata else msgspec.UNSET
            event = Started(attempt, "started", facts, self.run_id, SCHEMA_VERSION, self.seq + 1, self._now())
            self._turn(event, "started")
        self._file.sync()

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

    def flush(self) -> None:
        """Bring to the file what waits.

        Raises:
            EventLogError: It could not be written.
        """
        if self._file.closed:  # before the lock is taken, as in `_require_open`
            return
        with self._lock:
            self._write_waiting()

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
        attempt = self._attempt
        if attempt.phase != "started":
            raise attempt.refusal("metric", attempt.phase)
        if step in attempt.checkpointed:
            raise attempt.too_late(taken, step)
        if RESUMED_METRIC in taken:
            attempt.note_resume(taken[RESUMED_METRIC], step)
        elif ROLLED_BACK_METRIC in taken:
            attempt.note_roll_back(taken[ROLLED_BACK_METRIC], step)
        # Without the lock, which would cost a step 2 µs: `_take_waiting` meets what changes after the looks above.
        self._waiting.append((taken, step, self._clock()))
        file = self._file
        if file.closed:
            raise self._attempt.refusal("metric", "closed")
        if self._is_due or len(self._waiting) >= MOST_WAITING:
            with self._lock:
                self._write_waiting()
        elif not file.is_roused:
            with self._lock:
                if not file.rouse():
                    self._write_waiting()

    def checkpoint(self, *, path: str | os.PathLike[str], step: int) -> None:
        """A checkpoint is durable; from now on the log takes no further metric of its step.

        Raises:
            TypeError: `path` is not a path, or `step` is not an integer.
            ValueError: `path` is empty, or `step` negative.
            EventLogError: The attempt has not started or is over, or the line could not be written.
        """
        artifact, step = path_text("path", path), checked_step(step)
        self._require_open("checkpoint")
        with self._lock:
            self._attempt.require("checkpoint", "started")
            self._write_waiting()
            self._attempt.checkpointed.add(step)
            self._file.append(encode_line(self._artifact("checkpoint", artifact, step)))
        self._file.sync()

    def sample(self, *, path: str | os.PathLike[str], step: int) -> None:
        """A sample was written; raises as `checkpoint` does."""
        artifact, step = path_text("path", path), checked_step(step)
        self._require_open("sample")
        with self._lock:
            self._attempt.require("sample", "started")
            self._write_waiting()
            self._file.append(encode_line(self._artifact("sample", artifact, step)))

    def completed(
        self, *, step: int, final_checkpoint: str | os.PathLike[str] | None, stopped: str | None = None
    ) -> None:
        """The attempt ended as planned.

        Args:
            step: Completed steps.
            final_checkpoint: Where the final artifact is; None when there is none.
            stopped: What ended it before its last step, such as ``should_stop`` or ``data_exhausted``.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: `step` is negative, or a string empty.
            EventLogError: The attempt has not started or is over, or the line could not be written.
        """
        step = checked_step(step)
        final = None if final_checkpoint is None else path_text("final_checkpoint", final_checkpoint)
        reason = msgspec.UNSET if stopped is None else checked_text("stopped", stopped)
        self._require_open("completed")
        with self._lock:
            self._attempt.require("completed", "started")
            self._write_waiting()
            event = Completed("completed", final, self.run_id, SCHEMA_VERSION, self.seq + 1, step, reason, self._now())
            self._turn(event, "ended")
        self._file.sync()

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
        self._require_open("failed")
        with self._lock:
            self._attempt.require("failed", "new", "started")
            self._write_waiting()
            event = Failed(
                category, text, "failed", bool(resumable), self.run_id, SCHEMA_VERSION, self.seq + 1, step, self._now()
            )
            self._turn(event, "ended")
        self._file.sync()

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
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _now(self) -> int:
        return timestamp_ms(self._clock())

    def _artifact(self, event: str, path: str, step: int) -> Artifact:
        return Artifact(event, path, self.run_id, SCHEMA_VERSION, self.seq + 1, step, self._now())

    def _require_open(self, event: str) -> None:
        # Before the lock is taken: another thread may have held it when this process was forked off.
        if self._file.closed:
            raise self._attempt.refusal(event, "closed")

    def _turn(self, event: Started | Completed | Failed, phase: Phase) -> None:
        """Write an event that changes the phase; an interrupt leaves both changed, or neither."""
        before, lines = self._attempt.phase, self._file.lines
        try:
            self._attempt.phase = phase
            self._file.append(encode_line(event))
        except BaseException:
            if self._file.lines == lines:
                self._attempt.phase = before
            raise

    def _write_waiting(self) -> None:
        """Write the lines that wait, under the lock; those of the next call wait again."""
        if self._waiting:
            self._is_due = False
            self._file.append(*metric_lines(self._take_waiting(), run_id=self.run_id, seq=self.seq + 1))

    def _take_waiting(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """What waits, less what may no longer be written.

        Another thread can have reported a checkpoint of its step, or the end, between a look and a note in `metrics`.
        """
        for _ in range(len(self._waiting)):
            report = values, step, _ = self._waiting.popleft()
            if step in self._attempt.checkpointed or self._attempt.phase != "started":
                log.warning("metrics %s of step %d came too late for %s", ", ".join(values), step, self.path)
            else:
                yield report

    def _hurry(self) -> None:
        """In the flushing thread, every `flush_every_s` while there is something to do.

        The thread that reports metrics should write them too: each write lets go of the interpreter's lock, and another
        thread would wait to get it back for every line. This one writes where no call has come for as long again.
        """
        if not self._waiting or not self._is_due:
            self._is_due = True
        elif self._lock.acquire(blocking=False):  # `close` holds it while it waits for this thread
            try:
                self._write_waiting()
            finally:
                self._is_due = True  # nothing waits any longer; where it failed, the next call is to hear of it
                self._lock.release()
        if self._waiting:
            self._file.rouse()


def _flush_at_exit() -> None:
    """The last lines of a log that was not closed."""
    for event_log in list(_open_logs):
        event_log.flush()


atexit.register(_flush_at_exit)
