"""The rules of an event log: which event may follow which.

The writer refuses events that break them, and `validate_events` lists such events with their lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

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
    key_faults,
)
from .json_lines import Position, complete_lines, decode_object, encode_json, encode_lines

Phase = Literal["new", "started", "ended"]
Fault = tuple[str, str]
"""Name of a broken rule, as in `Violation`, and the reason."""


class Rules:
    """The rules of an attempt: which event may come next. Not thread-safe.

    Attributes:
        phase: ``new`` before ``started``, ``ended`` after the terminal event.
        checkpointed: Steps with a reported checkpoint; no further metric of such a step is allowed.
    """

    def __init__(self) -> None:
        self.phase: Phase = "new"
        self.checkpointed: set[int] = set()
        self._run_id = ""
        self._has_resumed = False

    def take(self, event: Event, *more: Metric) -> Fault | None:
        """Take `event` as the next one; after a metric, also the metrics `more`.

        ``started`` is always allowed, because a killed attempt has no terminal event. ``failed`` is always allowed,
        because an attempt that never started has only that.

        Returns:
            The broken rule, if one of the events breaks a rule; then none of them is taken.
        """
        if isinstance(event, Started):
            self.begin(event.run_id)
        elif isinstance(event, Failed):
            self.phase = "ended"
        elif self.phase == "ended":
            return "terminal", "the attempt already has its terminal event"
        elif self.phase == "new":
            return "started", "the attempt has not started"
        elif event.run_id != self._run_id:
            return "run_id", f"this attempt has {self._run_id!r}, but the event has {event.run_id!r}"
        elif isinstance(event, Metric):
            has_resumed, checkpointed = self._has_resumed, self.checkpointed
            for metric in (event, *more):
                name, step, value = metric.name, metric.step, metric.value
                if step in checkpointed:
                    return "order", (
                        f"metric {name!r} of step {step} comes after a checkpoint of that step; "
                        "report the metrics of a step before its checkpoint"
                    )
                if name == RESUMED_METRIC:
                    if has_resumed or value != step:
                        once = "occurs once in an attempt and its value is its step"
                        return "resumed", f"{name!r} {once}; got {value} at step {step}"
                    has_resumed = True
                elif name == ROLLED_BACK_METRIC:
                    if value is None or not 0 <= value <= step:
                        why = f"the value of {name!r} is a step, and not after its own step; got {value} at step {step}"
                        return "rolled_back", why
                    checkpointed = {each for each in checkpointed if each <= value}
            self._has_resumed, self.checkpointed = has_resumed, checkpointed
        elif isinstance(event, Checkpoint):
            self.checkpointed.add(event.step)
        elif isinstance(event, Completed):
            self.phase = "ended"
        return None

    def begin(self, run_id: str) -> None:
        """Begin an attempt of `run_id`."""
        self.checkpointed, self._has_resumed, self._run_id = set(), False, run_id
        self.phase = "started"


_encode_as_before: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
"""Writes numbers and characters that are not ASCII as the older runtime did."""


@dataclass(frozen=True)
class Violation:
    """A broken rule.

    Attributes:
        line: Line number, from 1.
        rule: ``json``, ``form``, ``schema``, ``seq``, ``started``, ``run_id``, ``attempt``,
            ``terminal``, ``order``, ``resumed`` or ``rolled_back``.
        message: Description of the fault.
    """

    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.message}"


def validate_events(path: str | os.PathLike[str]) -> list[Violation]:
    """Return every violation of ``trainer_event.v1`` in a log; empty for a valid one.

    ==========  ====================================================================================================
    json        each line is one JSON object in UTF-8, without bare NaN
    form        compact, each key once, keys in order
    schema      the fields of its kind, as in `event_schema`
    seq         1 on the first line, one more on each following line
    started     an attempt begins with ``started``, except for a single ``failed``
    run_id      the same on all lines of an attempt
    attempt     in ``started``: one more than the earlier attempts of the run; absent if it is 1
    terminal    no event of an attempt follows its ``completed`` or ``failed``
    order       no metric of a step after a checkpoint of that step, unless the run went back before it in between
    resumed     ``trainer/resumed_from_step`` at most once in an attempt; its value is its step
    rolled_back the value of ``trainer/rolled_back_to_step`` is a step, and not after its own step
    ==========  ====================================================================================================

    A last line without a newline is not complete yet, and an attempt without a terminal event was killed or is still
    running: both are valid.

    Raises:
        EventLogError: The log is absent or unreadable.
    """
    return list(iter_violations(path))


def iter_violations(path: str | os.PathLike[str]) -> Iterator[Violation]:
    """Like `validate_events`, but yield one violation at a time, for a log larger than memory."""
    log, position = _Log(), Position()
    for line in complete_lines(path, position):
        event, problem = None, ""
        try:
            event = decode_event(line)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        # Nearly all lines are exactly as `EventLog` writes them, so the slower check of their form and keys can be
        # skipped. It cannot for ``failed``, because an older runtime wrote such lines without two required keys.
        is_as_written = event is not None and type(event) is not Failed and encode_lines([event]) == line
        for rule, message in log.check(event) if event and is_as_written else _faults(line, event, problem, log):
            yield Violation(position.line, rule, message)


def _faults(line: bytes, event: Event | None, problem: str, log: _Log) -> Iterator[Fault]:
    """Yield every fault of a line: in its form, its content and its position.

    Args:
        line: The line, with its newline.
        event: The event on it; None if it is not valid.
        problem: Why it is not valid.
        log: The state of the log.
    """
    text = line[:-1]
    try:
        found = decode_object(text)
    except (ValueError, RecursionError) as error:
        yield "json", str(error)
        log.skip({})
        return
    if text not in (encode_json(found), _encode_as_before(found).encode()):
        yield "form", "it is not compact JSON with each key once and all keys in order"
    for fault in [problem] if event is None else key_faults(type(event), found):
        yield "schema", fault
    if event is None:
        log.skip(found)
    else:
        yield from log.check(event)


class _Log:
    """The state of a log up to the current line: the rules of its attempts, and its counters."""

    def __init__(self) -> None:
        self._rules = Rules()
        self._seq: int | None = 0
        self._attempts = Counter[str]()

    def check(self, event: Event) -> Iterator[Fault]:
        """Take the valid `event` as the next one, and yield the rules on order that it breaks."""
        if self._seq is not None and event.seq != self._seq + 1:
            yield "seq", f"expected {self._seq + 1}, found {event.seq}"
        self._seq = event.seq
        if isinstance(event, Started):
            self._attempts[event.run_id] += 1
            expected, found = self._attempts[event.run_id], event.attempt
            if expected != (1 if found is msgspec.UNSET else found):
                yield "attempt", f"expected {expected} for run {event.run_id!r}, found {found!r}"
        if fault := self._rules.take(event):
            yield fault

    def skip(self, line: dict[str, Any]) -> None:
        """Skip a line that is not a valid event, but note if an attempt begins or ends there."""
        seq, kind, run_id = line.get("seq"), str(line.get("event")), str(line.get("run_id"))
        self._seq = seq if type(seq) is int else None
        if kind == "started":
            self._attempts[run_id] += 1
            self._rules.begin(run_id)
        elif kind in TERMINAL_EVENTS:
            self._rules.phase = "ended"
