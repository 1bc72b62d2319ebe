"""Proves the rules of an event log, each fault with its line."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from .attempt import Attempt, Fault
from .event import (
    RESUMED_METRIC,
    ROLLED_BACK_METRIC,
    TERMINAL_EVENTS,
    Event,
    Failed,
    Metric,
    Started,
    decode_event,
    encode_event,
    event_faults,
)
from .reader import decode_object, whole_lines

__all__ = ["Violation", "iter_violations", "validate_events"]

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
    rules = _Rules()
    for number, line in whole_lines(path):
        metric = _metric_as_written(line)
        if metric is not None and rules.accepts(metric):
            continue  # nearly all lines of a log, and a tenth of the cost
        for rule, message in _faults(number, line, rules):
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
    except ValueError as error:
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

    def accepts(self, metric: Metric) -> bool:
        """Whether a metric breaks no rule, and what `check` remembers of it is remembered; else nothing is."""
        attempt, seq = self._open, metric.seq
        if (
            attempt is None
            or self._seq is None
            or seq != self._seq + 1
            or metric.run_id != attempt.run_id
            or metric.step in attempt.checkpointed
            or metric.name in (RESUMED_METRIC, ROLLED_BACK_METRIC)
        ):
            return False
        self._seq = seq
        return True

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
