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
    event_faults,
)
from .json_lines import Position, decode_object, encode_json, whole_lines

__all__ = ["Fault", "Phase", "Rules", "Violation", "iter_violations", "validate_events"]

Phase = Literal["new", "started", "ended"]
Fault = tuple[str, str]
"""The name of a broken rule, as `Violation` has it, and the reason in words."""


class Rules:
    """The rules of an attempt: which event may come next. Not thread-safe.

    Attributes:
        phase: ``new`` before ``started``, ``ended`` once the terminal event is there.
        checkpointed: Steps of which a checkpoint was reported, and that take no further metric.
    """

    def __init__(self) -> None:
        self.phase: Phase = "new"
        self.checkpointed: set[int] = set()
        self._run_id = ""
        self._has_resumed = False

    def fault(self, event: Event) -> Fault | None:
        """The rule that `event` would break as the next one; None if it may come.

        An attempt that was killed has no end, so ``started`` may always come, and a ``failed`` that is none of this
        attempt's is that of one that never started.
        """
        if isinstance(event, Started) or (isinstance(event, Failed) and event.run_id != self._run_id):
            return None
        if self.phase == "ended":
            return None if isinstance(event, Failed) else ("terminal", "the attempt already has its terminal event")
        if self.phase == "new":
            return None if isinstance(event, Failed) else ("started", "the attempt has not started")
        if event.run_id != self._run_id:
            return "run_id", f"expected {self._run_id!r} of this attempt, found {event.run_id!r}"
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

    def begin(self, run_id: str) -> None:
        """An attempt of `run_id` has started."""
        self.checkpointed, self._has_resumed, self._run_id = set(), False, run_id
        self.phase = "started"

    def take(self, event: Event) -> None:
        """Go on to after `event`."""
        if isinstance(event, Started):
            self.begin(event.run_id)
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
        message: The fault, in words.
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
    """Like `validate_events`, but one at a time, for a log that is larger than memory."""
    log, position = _Log(), Position()
    for line in whole_lines(path, position):
        event = _metric_as_written(line)
        # Nearly all lines of a log are sound by themselves, and looking at how they are written costs the most.
        for rule, message in _faults(line, log) if event is None else log.check(event):
            yield Violation(position.line, rule, message)


def _metric_as_written(line: bytes) -> Metric | None:
    """The metric of a line that is written exactly as `EventLog` writes it; None for any other line.

    A line that comes out the same again is compact and sorted, has all keys, and none that is unknown or there twice.
    """
    try:
        event = decode_event(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, Metric) and encode_json(event) + b"\n" == line else None


def _faults(line: bytes, log: _Log) -> Iterator[Fault]:
    """Every fault of a line: its form, its content and its position."""
    try:
        found = decode_object(line[:-1])
    except (ValueError, RecursionError) as error:
        yield "json", str(error)
        log.skip({})
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
        log.skip(found)
    else:
        yield from log.check(event)


class _Log:
    """A log as far as it was read: the rules of its attempts, and its numbers."""

    def __init__(self) -> None:
        self._rules = Rules()
        self._seq: int | None = 0
        self._attempts = Counter[str]()

    def check(self, event: Event) -> Iterator[Fault]:
        """Faults in the position of `event`, a sound event, as the next one."""
        if self._seq is not None and event.seq != self._seq + 1:
            yield "seq", f"expected {self._seq + 1}, found {event.seq}"
        self._seq = event.seq
        if isinstance(event, Started):
            self._attempts[event.run_id] += 1
            expected, found = self._attempts[event.run_id], event.attempt
            if expected != (1 if found is msgspec.UNSET else found):
                yield "attempt", f"expected {expected} of run {event.run_id!r}, found {found!r}"
        elif fault := self._rules.fault(event):
            yield fault
        self._rules.take(event)

    def skip(self, found: dict[str, Any]) -> None:
        """Pass over a line that is no sound event, but for whether an attempt begins or ends there."""
        seq, kind, run_id = found.get("seq"), found.get("event"), str(found.get("run_id"))
        self._seq = seq if type(seq) is int else None
        if kind == "started":
            self._attempts[run_id] += 1
            self._rules.begin(run_id)
        elif kind in TERMINAL_EVENTS:
            self._rules.phase = "ended"
