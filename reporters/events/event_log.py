"""The event log of a run: ``trainer_event.v1``, one JSON object per line.

An `EventLog` writes one attempt of one run. It refuses events that would break the rules of the format, so a log that
it wrote always passes ``genlight events RUN --check``.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from time import time_ns
from typing import Any, Literal, Self, cast

import msgspec

from ...adapter.contract.exceptions import EventLogError, FailureCategory, StopReason
from ...adapter.plumbing.failures import Failure
from .event import (
    MAX_STEP,
    STOP_REASONS,
    Checkpoint,
    Completed,
    Event,
    Failed,
    Finding,
    Metadata,
    Metric,
    Sample,
    Started,
    decode_event,
)
from .json_lines import LineFile, encode_lines, storable
from .reader import starts_of
from .validation import Phase, Rules

log = logging.getLogger(__name__)


class EventLog:
    """Writes the events of one attempt; conforms to `TrainingReporter`.

    The order is ``started``, any number of ``metric``, ``checkpoint``, ``sample`` and ``finding``, then one
    ``completed`` or ``failed``, which ends the attempt. An attempt that never started has only ``failed``. Every event
    is in the file when its call returns, so that a killed process loses none. After ``started``, ``checkpoint``,
    ``completed`` and ``failed``, the file is also durable when the call returns. So a power cut loses only events that
    a run reports again when it resumes from a durable checkpoint.

    Any thread may call these methods. In a forked child the log is closed, and a copy of a log is closed too.

    Attributes:
        run_id: The run.
        attempt: Number of this attempt, from 1: one more than the ``started`` lines of the run in the file.
        last_checkpoint: The newest checkpoint that this attempt reported.

    Args:
        path: The file. If it exists, new lines are appended: an incomplete last line is cut off and `seq` continues
            from the last complete line. A new file begins with `seq` 1. A file may hold several runs, one after the
            other.
        run_id: The run. Empty only if an attempt failed before its run was known; such a log accepts only ``failed``.

    Raises:
        EventLogError: Another process writes the file, it cannot be opened, or it is not an event log.
    """

    def __init__(self, path: str | os.PathLike[str], *, run_id: str) -> None:
        self.run_id = storable(checked_text("run_id", run_id, may_be_empty=True))
        self.last_checkpoint: str | None = None
        self._lock = threading.Lock()
        self._file = LineFile(path, decode_event)
        self._last_seq_found: int = 0 if self._file.last is None else self._file.last.seq
        self.attempt = 1 + len(starts_of(self._file.path, self.run_id))
        self._rules = Rules()
        self._place: dict[str, Any] = {"run_id": self.run_id, "seq": 0, "timestamp_ms": 0}
        """Fields of every event; `_append` sets the last two."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

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
        """Progress of the attempt: ``new`` before ``started``, ``ended`` once the terminal event is written."""
        return self._rules.phase

    @property
    def closed(self) -> bool:
        """Whether the file was closed; always true in a forked child."""
        return self._file.closed

    @property
    def is_in_place(self) -> bool:
        """Whether `path` is still the file that this log writes; False once it was removed or replaced."""
        return self._file.is_in_place

    def takes_metrics_of(self, step: int) -> bool:
        """Return whether `metric` would accept `step`: no metric may follow a checkpoint of its step."""
        return step not in self._rules.checkpointed

    def started(self, *, run_id: str | None = None, metadata: Mapping[str, Any] | None = None) -> None:
        """Report that training begins.

        Args:
            run_id: The run of this log or None; the protocol `TrainingReporter` passes it.
            metadata: The origin of the attempt, from `run_metadata`; without secrets.

        Raises:
            EventLogError: The attempt began earlier, the run is unknown, or the line could not be written.
        """
        if not self.run_id or run_id not in {None, self.run_id}:
            raise EventLogError(f"run {run_id!r} cannot start in the event log of run {self.run_id!r}: {self.path}")
        attempt = self.attempt if self.attempt > 1 else msgspec.UNSET
        about = cast("Metadata", dict(metadata)) if metadata else msgspec.UNSET
        self._write(Started(**self._place, attempt=attempt, metadata=about))
        self._file.sync()

    def metric(self, *, name: str, value: Any, step: int) -> None:
        """Report one scalar: a number, a numpy scalar or a tensor of one element (copied from its device).

        Raises:
            TypeError: The value is not one real number, the name is not a string, or the step is not an integer.
            ValueError: The name is empty, or the step negative.
            EventLogError: The attempt has not started or has ended, a checkpoint of this step was already reported, or
                the line could not be written.
        """
        self.metrics({name: value}, step=step)

    def metrics(self, values: Mapping[str, Any], *, step: int) -> None:
        """Report scalars of one step, a line for each, in their order; write none of them if one is refused.

        Raises the same errors as `metric`.
        """
        # This code makes few calls. In a loop that reports every step, each call costs half a microsecond, because the
        # processor's caches no longer hold its code.
        step = step if type(step) is int and 0 <= step <= MAX_STEP else checked_step(step)
        run_id, events = self.run_id, []
        for name, value in values.items():
            number = value if type(value) is float else float_of(name, value)
            name = name if type(name) is str and name else checked_text("name", name)
            event = Metric(run_id=run_id, seq=0, timestamp_ms=0, name=name, step=step, value=number)
            if not math.isfinite(number):
                event.value, event.value_text = None, cast("Any", str(number))
            events.append(event)
        if events:
            self._write(*events)

    def checkpoint(self, *, path: str | os.PathLike[str], step: int) -> None:
        """Report a durable checkpoint; the log then accepts no further metric of its step.

        Raises:
            TypeError: `path` is not a path, or `step` is not an integer.
            ValueError: `path` is empty, or `step` negative.
            EventLogError: The attempt has not started or is over, or the line could not be written.
        """
        text = _path_text("path", path)
        self._write(Checkpoint(**self._place, path=text, step=checked_step(step)))
        self.last_checkpoint = text
        self._file.sync()

    def sample(self, *, path: str | os.PathLike[str], step: int) -> None:
        """Report a sample; raises the same errors as `checkpoint`."""
        self._write(Sample(**self._place, path=_path_text("path", path), step=checked_step(step)))

    def finding(self, *, kind: str, level: Literal["ok", "warn", "fail"], step: int, text: str) -> None:
        """Report a finding, for example of kind ``resume_proof``.

        Raises:
            TypeError: `step` is not an integer, or a text is not a string.
            ValueError: `step` is negative, or a text empty.
            EventLogError: The attempt has not started or is over, or the line could not be written.
        """
        texts: dict[str, Any] = {"kind": checked_text("kind", kind), "text": checked_text("text", text)}
        self._write(Finding(**self._place, **texts, level=level, step=checked_step(step)))

    def completed(
        self,
        *,
        step: int,
        final_checkpoint: str | os.PathLike[str] | None,
        stopped: str | None = None,
        finite: bool = True,
    ) -> None:
        """Report that the attempt ended as planned.

        Args:
            step: Completed steps.
            final_checkpoint: Path of the final artifact; None if there is none.
            stopped: The reason for an end before the last step, such as ``should_stop`` or ``data_exhausted``.
            finite: False if a weight is known to be nan or infinite.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: `step` is negative, or a string empty.
            EventLogError: The attempt has not started or is over, or the line could not be written.
        """
        step = checked_step(step)
        final = None if final_checkpoint is None else _path_text("final_checkpoint", final_checkpoint)
        reason = msgspec.UNSET if stopped is None else checked_text("stopped", stopped)
        known = msgspec.UNSET if finite else False
        self._write(Completed(**self._place, step=step, final_checkpoint=final, stopped=reason, finite=known))
        self._file.sync()

    def failed(
        self, *, step: int, error: str, category: FailureCategory | StopReason | None = None, resumable: bool = False
    ) -> None:
        """Report that the attempt ended by an exception or a stop; allowed before ``started``.

        Args:
            step: The step that was running, or the number of completed steps.
            error: Text without secrets; ``category:`` is added in front unless it is there. For a stop, its reason.
            category: The category; None means `error` if that is a stop reason, otherwise ``train-step``.
            resumable: Whether a restart is expected to continue from here.

        Raises:
            TypeError: `step` is not an integer.
            ValueError: `step` is negative, `category` unknown, or `error` not the reason of the stop.
            EventLogError: The attempt is over, or the line could not be written.
        """
        step = checked_step(step)
        if category is None:
            category = cast("StopReason", error) if error in STOP_REASONS else "train-step"
        if category not in STOP_REASONS and not error.startswith(f"{category}:"):
            error = f"{category}:{error}"
        end: dict[str, Any] = {"step": step, "error": error, "category": category, "resumable": bool(resumable)}
        self._write(Failed(**self._place, **end))
        self._file.sync()

    def record_failure(self, failure: Failure, step: int) -> None:
        """Like `failed`, but a write error is only logged, so that it does not hide the original failure."""
        try:
            self.failed(step=step, error=failure.text, category=failure.category, resumable=failure.resumable)
        except (EventLogError, OSError) as problem:
            log.error("the failure could not be recorded: %s", problem)  # noqa: TRY400

    def is_canceled(self) -> bool:
        """False: a log never asks for a stop."""
        return False

    def close(self) -> None:
        """Make every line durable and close the file. An attempt without a terminal event counts as killed."""
        if self._file.closed:
            return
        with self._lock:
            try:
                self._file.sync()
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: Event, *metrics: Metric) -> None:
        """Write an event, or several metrics, and set their `seq` and time; write none if the rules refuse one of them.

        If an interrupt arrives, either the events are written and the phase has changed, or neither.
        """
        if self._file.closed:  # checked before the lock: a thread may have held the lock when this process was forked
            raise self._refusal(event, f"the log is closed in process {os.getpid()}")
        # The block must not contain a loop: in Python 3.13.0, an exception that a signal handler raises at the end of a
        # loop leaves the block without releasing the lock.
        with self._lock:
            self._append(event, *metrics)

    def _append(self, first: Event, *metrics: Metric) -> None:
        """Write events that the rules allow; see `_write`."""
        log, rules, events = self._file, self._rules, [first, *metrics]
        phase, seq = rules.phase, self._last_seq_found + log.lines
        timestamp_ms = max(0, time_ns() // 1_000_000)  # the clock of a machine may never have been set
        for event in events:
            event.seq = seq = seq + 1
            event.timestamp_ms = timestamp_ms
        if phase == "ended" or (phase != "new" and type(first) is Started):
            state = "already has its terminal event" if phase == "ended" else "has already started"
            raise self._refusal(first, f"the attempt {state}")
        lines = log.lines
        try:
            if fault := rules.take(first, *metrics):
                raise self._refusal(first, fault[1])
            log.append(encode_lines(events), len(events))
        except BaseException:
            if log.lines == lines:
                rules.phase = phase
            raise

    def _refusal(self, event: Event, why: str) -> EventLogError:
        return EventLogError(f"cannot write {type(event).__name__.lower()!r} to {self.path}: {why}")


def checked_text(field: str, value: Any, *, may_be_empty: bool = False) -> str:
    """Return `value` as a plain string.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"Invalid `{field}`. Expected a string, but received {value!r}.")
    if not value and not may_be_empty:
        raise ValueError(f"Invalid `{field}`. Expected a non-empty string, but received ''.")
    return str.__str__(value)


def _path_text(field: str, value: Any) -> str:
    """Return a path of any type as a string; raises the same errors as `checked_text`."""
    try:
        return checked_text(field, os.fsdecode(value))
    except TypeError:
        raise TypeError(f"Invalid `{field}`. Expected a path, but received {value!r}.") from None


def checked_step(value: Any, name: str = "step") -> int:
    """Return the argument `name`, a number of completed steps or epochs, as an int.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is negative, or does not fit into 64 bits.
    """
    try:
        step = operator.index(value)
    except TypeError:
        raise TypeError(f"Invalid `{name}`. Expected an integer >= 0, but received {value!r}.") from None
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"Invalid `{name}`. Expected an integer from 0 to 2**63 - 1, but received {step}.")
    return int(step)


def float_of(name: str, value: Any) -> float:
    """Return the value of a metric (a number, a numpy scalar or a tensor of one element) as a float.

    Raises:
        TypeError: It is not a real number within the range of a float.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError(f"{value!r} is a text")
        # `item` before `float`: tensors that require a gradient and one-element arrays warn on `float`.
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"Invalid value of metric {name!r}. Expected one number, but received {type(value).__name__}: {error}."
        ) from error
