"""The rules of an event log: which event may follow which.

The writer refuses what breaks them, and `validate_events` lists it, each fault with its line.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .event import (
    RESUMED_METRIC,
    ROLLED_BACK_METRIC,
    TERMINAL_EVENTS,
    Checkpoint,
    Completed,
    Event,
    Failed,
    Metric,
    Started,
    decode_event,
    encode_event,
    event_faults,
)
from .json_lines import Position, decode_object, whole_lines

__all__ = ["Attempt", "Fault", "Phase", "Violation", "iter_violations", "validate_events"]

Phase = Literal["new", "started", "ended"]
Fault = tuple[str, str]
"""The name of a broken rule, as `Violation` has it, and the reason in words."""


class Attempt:
    """How far an attempt is. Not thread-safe.

    Attributes:
        run_id: Whose attempt it is.
        phase: ``new`` before ``started``, ``ended`` once the terminal event is there.
        checkpointed: Steps of which a checkpoint was reported, and that take no further metric.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.phase: Phase = "new"
        self.checkpointed: set[int] = set()
        self._has_resumed = False

    def fault(self, event: Event) -> Fault | None:
        """The rule that `event` would break as the next one of this attempt; None where it may come."""
        if self.phase == "ended":
            return "terminal", "the attempt already has its terminal event"
        if isinstance(event, Started):
            return None if self.phase == "new" else ("started", "the attempt has already started")
        if self.phase == "new":
            return None if isinstance(event, Failed) else ("started", "the attempt has not started")
        if event.run_id != self.run_id:
            return "run_id", f"expected {self.run_id!r} of this attempt, found {event.run_id!r}"
        if not isinstance(event, Metric):
            return None
        name, step, value = event.name, event.step, event.value
        if step in self.checkpointed:
            return "order", (
                f"metric {name!r} of step {step} comes after a checkpoint of that step; "
                "report the metrics of a step before its checkpoint"
            )
        if name == RESUMED_METRIC and (self._has_resumed or value != step):
            return "resumed", f"{name!r} comes once in an attempt and its value is its step; got {value} at step {step}"
        if name == ROLLED_BACK_METRIC and (value is None or not 0 <= value <= step):
            return "rolled_back", (
                f"{name!r} has a step as its value that is not after its own; got {value} at step {step}"
            )
        return None

    def take(self, event: Event) -> None:
        """Go on to after `event`, which has no fault."""
        if isinstance(event, Started):
            self.phase = "started"
        elif isinstance(event, Completed | Failed):
            self.phase = "ended"
        elif isinstance(event, Checkpoint):
            self.checkpointed.add(event.step)
        elif isinstance(event, Metric) and event.name == RESUMED_METRIC:
            self._has_resumed = True
        elif isinstance(event, Metric) and event.name == ROLLED_BACK_METRIC:
            self.checkpointed = {step for step in self.checkpointed if step <= event.number}


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_SPACE = re.compile(rb"\s")


@dataclass(frozen=True)
class Violation:
    """A broken rule.

    Attributes:
        line: Number of the line, from 1.
        rule: ``json``, ``compact``, ``sorted``, ``schema``, ``seq``, ``started``, ``run_id``, ``attempt``,
            ``terminal``, ``order``, ``resumed`` or ``rolled_back``.
        message: What was found, in words.
    """

    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.message}"


def validate_events(path: str | os.PathLike[str]) -> list[Violation]:
    """Every violation of ``trainer_event.v1`` in a log; empty for a sound one.

    ==========  ====================================================================================================
    json        each line is one JSON object in UTF-8, without bare NaN and without a key twice
    compact     no white space between its parts
    sorted      keys in order
    schema      the fields of its kind, as `event_schema` says
    seq         1 on the first line, one more on each that follows
    started     an attempt begins with ``started``; a ``failed`` may stand alone
    run_id      the same on all lines of an attempt
    attempt     of a ``started``: one more than its run had before, and left out when that is 1
    terminal    nothing of an attempt follows its ``completed`` or ``failed``
    order       no metric of a step after a checkpoint of that step, unless the run went back before it in between
    resumed     ``trainer/resumed_from_step`` once an attempt, at the step that is its value
    rolled_back ``trainer/rolled_back_to_step`` with a step as its value that is not after its own
    ==========  ====================================================================================================

    A last line without a newline is not a line yet, and an attempt without terminal event was killed or still runs:
    both are sound.

    Raises:
        EventLogError: The log is absent or unreadable.
    """
    return list(iter_violations(path))


def iter_violations(path: str | os.PathLike[str]) -> Iterator[Violation]:
    """As `validate_events`, one by one: for a log that is larger than memory."""
    rules, position = _Rules(), Position()
    for line in whole_lines(path, position):
        number, event = position.line, _metric_as_written(line)
        # Nearly all lines of a log are sound by themselves, and looking at how they are written costs the most.
        for rule, message in _faults(number, line, rules) if event is None else rules.check(number, event):
            yield Violation(number, rule, message)


def _metric_as_written(line: bytes) -> Metric | None:
    """The metric of a line that is written exactly as `EventLog` writes it; None for any other line.

    A line that comes out the same again is compact and sorted, has all keys, and none that is unknown or there twice.
    """
    try:
        event = decode_event(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, Metric) and encode_event(event) == line else None


def _faults(number: int, line: bytes, rules: _Rules) -> Iterator[Fault]:
    """Every fault of a line: how it is written, what is in it, and where it stands."""
    try:
        found = decode_object(line[:-1])
    except (ValueError, RecursionError) as error:
        yield "json", str(error)
        rules.skip(number, {})
        return
    keys: list[str] = [key for key, _ in json.loads(line, object_pairs_hook=list)]
    for key, count in Counter(keys).items():
        if count > 1:
            yield "json", f"key {key!r} comes {count} times"
    if keys != sorted(keys):
        yield "sorted", f"keys are in the order {', '.join(keys)}"
    if _SPACE.search(_STRING.sub(b"", line[:-1])):
        yield "compact", "white space between the parts of the object"
    for fault in event_faults(found):
        yield "schema", fault
    try:
        event = msgspec.convert(found, Event)
    except (ValueError, RecursionError):
        rules.skip(number, found)
    else:
        yield from rules.check(number, event)


class _Rules:
    """The rules between lines, over all attempts of a log."""

    def __init__(self) -> None:
        self._seq: int | None = 0
        self._started: Counter[str] = Counter()
        self._open: Attempt | None = None
        self._ended_at: int | None = None

    def check(self, number: int, event: Event) -> Iterator[Fault]:
        """The faults of the place of a sound event."""
        if self._seq is not None and event.seq != self._seq + 1:
            yield "seq", f"expected {self._seq + 1}, found {event.seq}"
        self._seq = event.seq
        if isinstance(event, Started):
            yield from self._begin(event)
        elif isinstance(event, Failed) and (self._open is None or event.run_id != self._open.run_id):
            self._end(number)  # an attempt that failed before it started
        elif self._open is None:
            kind = type(event).__name__.lower()
            if self._ended_at is not None:
                yield "terminal", f"{kind!r} follows the terminal event on line {self._ended_at}"
            else:
                yield "started", f"{kind!r} comes before any 'started'"
        else:
            fault = self._open.fault(event)
            if fault is not None:
                yield fault
            self._open.take(event)
            if self._open.phase == "ended":
                self._end(number)

    def skip(self, number: int, event: dict[str, Any]) -> None:
        """Pass over a line that is no sound event, but for whether an attempt begins or ends there."""
        seq = event.get("seq")
        self._seq = seq if isinstance(seq, int) and not isinstance(seq, bool) else None
        if event.get("event") == "started":
            self._start(str(event.get("run_id")))
        elif event.get("event") in TERMINAL_EVENTS:
            self._end(number)

    def _begin(self, event: Started) -> Iterator[Fault]:
        self._start(event.run_id)
        expected = self._started[event.run_id]
        found = 1 if event.attempt is msgspec.UNSET else event.attempt
        if found != expected:
            yield "attempt", f"expected {expected} of run {event.run_id!r}, found {found!r}"

    def _start(self, run_id: str) -> None:
        self._started[run_id] += 1
        self._open, self._ended_at = Attempt(run_id), None
        self._open.phase = "started"

    def _end(self, number: int) -> None:
        self._open, self._ended_at = None, number
