"""Proves the rules of an event log, each fault with its line."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from .lines import MAX_STEP, RESUMED_METRIC, ROLLED_BACK_METRIC, TERMINAL_EVENTS
from .reader import decode_object, whole_lines
from .schema import event_faults

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
    rules, as_written = _Rules(), _metric_as_written
    accepts = rules.accepts
    for number, line in whole_lines(path):
        metric = as_written(line)
        if metric is not None and accepts(metric):
            continue  # nearly all lines of a log, and a tenth of the cost
        event, faults = _parse(line[:-1])
        faults += rules.check(number, event) if event is not None else rules.skip()
        for rule, message in faults:
            yield Violation(number, rule, message)


class _SoundMetric(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A metric as `event_schema` wants it; its fields in the order in which they are written."""

    event: Literal["metric"]
    name: Annotated[str, msgspec.Meta(min_length=1)]
    run_id: Annotated[str, msgspec.Meta(min_length=1)]
    schema_version: Literal["trainer_event.v1"]
    seq: Annotated[int, msgspec.Meta(ge=1)]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    timestamp_ms: Annotated[int, msgspec.Meta(ge=0)]
    value: float | None
    value_text: Literal["nan", "inf", "-inf"] | msgspec.UnsetType = msgspec.UNSET


_decode_metric = msgspec.json.Decoder(_SoundMetric).decode
_encode_metric = msgspec.json.Encoder().encode


def _metric_as_written(line: bytes) -> _SoundMetric | None:
    """The metric of a line that is written exactly as `EventLog` writes it; None for any other line.

    A line that comes out the same again is compact and sorted, and holds no key twice.
    """
    try:
        metric = _decode_metric(line)
        if _encode_metric(metric) + b"\n" != line or (metric.value is None) is (metric.value_text is msgspec.UNSET):
            return None
    except (ValueError, RecursionError):
        return None
    return metric


_Fault = tuple[str, str]


def _parse(line: bytes) -> tuple[dict[str, Any] | None, list[_Fault]]:
    """The event of a line, None where it is not an object, and the faults of how it is written."""
    try:
        event = decode_object(line)
    except ValueError as error:
        return None, [("json", str(error))]
    faults: list[_Fault] = []
    keys: list[str] = [key for key, _ in json.loads(line, object_pairs_hook=list)]
    faults += [("json", f"key {key!r} comes {count} times") for key, count in Counter(keys).items() if count > 1]
    if keys != sorted(keys):
        faults.append(("sorted", f"keys are in the order {', '.join(keys)}"))
    if _SPACE.search(_STRING.sub(b"", line)):
        faults.append(("compact", "white space between the parts of the object"))
    faults += [("schema", message) for message in event_faults(event)]
    return event, faults


@dataclass
class _Attempt:
    """What the rules need to remember of the attempt that is open."""

    run_id: object
    checkpointed: dict[object, int] = field(default_factory=dict)
    resumed_at: int | None = None


class _Rules:
    """The rules between lines; trusts no field to be there or of its type."""

    def __init__(self) -> None:
        self._seq: int | None = 0
        self._attempts: Counter[str] = Counter()
        self._open: _Attempt | None = None
        self._ended_at: int | None = None

    def accepts(self, metric: _SoundMetric) -> bool:
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

    def check(self, number: int, event: dict[str, Any]) -> list[_Fault]:
        return [*self._check_seq(event.get("seq")), *self._check_place(number, event)]

    def skip(self) -> list[_Fault]:
        """Pass over a line that cannot be read; any `seq` may follow it."""
        self._seq = None
        return []

    def _check_seq(self, seq: object) -> Iterator[_Fault]:
        if isinstance(seq, bool) or not isinstance(seq, (int, float)):
            self._seq = None  # a fault of the schema
            return
        if self._seq is not None and seq != self._seq + 1:
            yield "seq", f"expected {self._seq + 1}, found {seq}"
        self._seq = int(seq)

    def _check_place(self, number: int, event: dict[str, Any]) -> Iterator[_Fault]:
        kind = event.get("event")
        if kind == "started":
            yield from self._begin(event)
        elif kind == "failed" and (self._open is None or event.get("run_id") != self._open.run_id):
            self._end(number)  # an attempt that failed before it started
        elif self._open is None:
            yield self._out_of_place(kind)
        else:
            yield from self._check_in_attempt(number, event, self._open)

    def _begin(self, event: dict[str, Any]) -> Iterator[_Fault]:
        run_id = event.get("run_id")
        self._open, self._ended_at = _Attempt(run_id), None
        if not isinstance(run_id, str):
            return
        self._attempts[run_id] += 1
        expected, found = self._attempts[run_id], event.get("attempt", 1)
        if found != expected:
            yield "attempt", f"expected {expected} of run {run_id!r}, found {found!r}"

    def _end(self, number: int) -> None:
        self._open, self._ended_at = None, number

    def _out_of_place(self, kind: object) -> _Fault:
        if self._ended_at is not None:
            return "terminal", f"{kind!r} follows the terminal event on line {self._ended_at}"
        return "started", f"{kind!r} comes before any 'started'"

    def _check_in_attempt(self, number: int, event: dict[str, Any], attempt: _Attempt) -> Iterator[_Fault]:
        kind, step = event.get("event"), event.get("step")
        if event.get("run_id") != attempt.run_id:
            yield "run_id", f"expected {attempt.run_id!r} of this attempt, found {event.get('run_id')!r}"
        if kind in TERMINAL_EVENTS:
            self._end(number)
        elif kind == "checkpoint" and isinstance(step, (int, float)):
            attempt.checkpointed.setdefault(step, number)
        elif kind == "metric":
            yield from _check_metric(number, event, attempt)


def _check_metric(number: int, event: dict[str, Any], attempt: _Attempt) -> Iterator[_Fault]:
    step, name = event.get("step"), event.get("name")
    if isinstance(step, (int, float)) and step in attempt.checkpointed:
        yield "order", f"metric of step {step} follows its checkpoint on line {attempt.checkpointed[step]}"
    if name == ROLLED_BACK_METRIC:
        yield from _take_roll_back(event.get("value"), step, attempt)
    if name != RESUMED_METRIC:
        return
    if attempt.resumed_at is not None:
        yield "resumed", f"this attempt already said on line {attempt.resumed_at} where it resumed"
    if event.get("value") != step:
        yield "resumed", f"value {event.get('value')!r} is not step {step!r}"
    attempt.resumed_at = number


def _take_roll_back(value: object, step: object, attempt: _Attempt) -> Iterator[_Fault]:
    """From here on the steps after `value` come once more."""
    if not isinstance(value, (int, float)) or not isinstance(step, (int, float)) or not 0 <= value <= step:
        yield "rolled_back", f"value {value!r} is not a step up to {step!r}"
        return
    attempt.checkpointed = {at: line for at, line in attempt.checkpointed.items() if not _is_later(at, value)}


def _is_later(step: object, than: float) -> bool:
    return isinstance(step, (int, float)) and step > than
