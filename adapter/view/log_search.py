"""Find the facts that a listing shows in an event log, without decoding every line.

A listing shows how the run ended, its newest start, the device time of its attempts, and a few values of a metric. Each
search begins where the previous one ended. Lines that cannot be read are skipped: the log may be torn, written by
another release, or still being written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...reporters.events.event import Completed, Event, Failed, Finding, Metric, Started
from ...reporters.events.json_lines import LONGEST_LINE, has_long_holes
from ...reporters.events.reader import evaluation_stage, event_on

_BLOCK_BYTES = 1 << 20
TAIL_BYTES = 32 << 10
"""Bytes to read from the end of a log: about two hundred lines."""
SKETCH_POINTS = 32
"""Maximum number of values in a sketch."""
_PIECE_BYTES = 8 << 10
"""Bytes to read for one value of a sketch: a step with some fifty metrics."""
PRICE = "price_per_device_hour"
"""Name of the job setting that has the price. The metadata of each attempt has the settings of its job."""


@dataclass(frozen=True)
class Search:
    """The facts that a search has found in a log so far.

    Attributes:
        until: Number of bytes searched.
        started: The newest start of an attempt that trains.
        proof: The result of comparing the steps that this attempt repeated; None if it repeated none.
        newest: The newest start of any attempt, also of one that only evaluates.
        step_time: The newest metric ``time/steps`` of the attempt that `started` begins: its seconds on steps so far.
        start_up: The metric ``time/start_up`` of that attempt: its seconds before the first step.
        device_s: Device seconds of the attempts before `newest`.
        cost: Cost of the attempts before `newest`; None if none of them had a price.
        last_ms: Time of the last line searched.
    """

    until: int = 0
    started: Started | None = None
    proof: Finding | None = None
    newest: Started | None = None
    step_time: Metric | None = None
    start_up: Metric | None = None
    device_s: float = 0.0
    cost: float | None = None
    last_ms: int = 0

    @property
    def goodput(self) -> float | None:
        """Share of the newest training attempt's time that was spent on steps, from 0 to 1; None if not reported."""
        if self.started is None or self.step_time is None or self.start_up is None:
            return None
        passed_s = (self.step_time.timestamp_ms - self.started.timestamp_ms) / 1000 + self.start_up.number
        return min(max(self.step_time.number / passed_s, 0.0), 1.0) if passed_s > 0 else None

    def end_attempt(self, ended_ms: int) -> Search:
        """Return the search after the attempt `newest` has ended at `ended_ms`, with its device time added."""
        if self.newest is None:
            return self
        metadata = metadata_of(self.newest)
        ranks, price = metadata.get("ranks"), job_of(metadata).get(PRICE)
        passed_s = max(ended_ms - self.newest.timestamp_ms, 0) / 1000
        device_s = passed_s * (ranks if isinstance(ranks, int) else 1)
        cost = self.cost
        if isinstance(price, int | float):
            cost = (cost or 0.0) + device_s / 3600 * price
        return replace(self, newest=None, device_s=self.device_s + device_s, cost=cost)


Searches = dict[tuple[int, int], Search]
"""The search of each log so far, by device and inode of the log."""


def metadata_of(started: Started | None) -> dict[str, Any]:
    """Return the metadata of an attempt; empty if it has none."""
    metadata: Any = None if started is None else started.metadata
    return metadata if isinstance(metadata, dict) else {}


def job_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the job by dotted name; empty if the metadata has none."""
    job = metadata.get("job")
    return job if isinstance(job, dict) else {}


def search_log(descriptor: int, searches: Searches) -> Search:
    """Search the lines that were added to a log since its search in `searches`, and store the new search there.

    The log is read in blocks, because a memory mapping would count as memory of this process.
    """
    status = os.fstat(descriptor)
    log = status.st_dev, status.st_ino
    search = searches.get(log, Search())
    if search.until > status.st_size:  # the log was replaced by a shorter one
        search = Search()
    end, at, rest = status.st_size, search.until, b""
    if has_long_holes(descriptor):  # a sparse file, which may seem to have gigabytes: search only its beginning
        end = min(end, _BLOCK_BYTES)
    while at < end and (piece := os.pread(descriptor, min(_BLOCK_BYTES, end - at), at)):
        block, at = rest + piece, at + len(piece)
        complete = block.rfind(b"\n") + 1
        search, rest = _search_lines(search, block[:complete]), block[complete:]
        if len(rest) > LONGEST_LINE:  # no event is that long: drop this beginning, so the line is skipped as unreadable
            rest = b""
    searches[log] = replace(search, until=at - len(rest))
    return searches[log]


def _search_lines(search: Search, block: bytes) -> Search:
    """Continue `search` in `block`, which has only complete lines."""
    newest_at = 0
    for at in sorted([*_places(block, b'"started"'), *_places(block, b'"resume_proof"')]):
        begin, event = _line_at(block, at)
        if isinstance(event, Started):
            before = _line_at(block, begin - 1)[1] if begin else None
            search = search.end_attempt(before.timestamp_ms if before is not None else search.last_ms)
            search = replace(search, newest=event)
            if evaluation_stage(event) is None:
                search, newest_at = replace(search, started=event, proof=None, step_time=None, start_up=None), at
        elif isinstance(event, Finding) and event.kind == "resume_proof":
            search = replace(search, proof=event)
    step_time, start_up = (_line_at(block, block.rfind(name, newest_at))[1] for name in _TIMES)
    if isinstance(step_time, Metric) and isinstance(start_up, Metric):
        search = replace(search, step_time=step_time, start_up=start_up)
    last = _line_at(block, len(block) - 1)[1]
    return search if last is None else replace(search, last_ms=last.timestamp_ms)


_TIMES = (b'"time/steps"', b'"time/start_up"')


def _places(block: bytes, mark: bytes) -> Iterator[int]:
    at = block.find(mark)
    while at >= 0:
        yield at
        at = block.find(mark, at + 1)


def _line_at(block: bytes, at: int) -> tuple[int, Event | None]:
    """Return the start of the complete line around `at`, and its event; None if there is none, or `at` is negative."""
    begin, end = block.rfind(b"\n", 0, max(at, 0)) + 1, block.find(b"\n", max(at, 0))
    return begin, event_on(block[begin:end]) if at >= 0 and end >= 0 else None


def read_tail(descriptor: int) -> tuple[list[Event], str]:
    """Return the last events of the newest attempt that trained, oldest first, and the error of a later start.

    If there are only events of evaluations, return those of the newest one.

    A later start that failed early wrote a ``failed`` event without a ``started``. Such an event is recognized by one
    of three signs: it follows the end of an attempt, its category is ``startup``, or it has step 0 although the run has
    trained.
    """
    begin = max(os.fstat(descriptor).st_size - TAIL_BYTES, 0)
    lines = os.pread(descriptor, TAIL_BYTES, begin).split(b"\n")[(1 if begin else 0) : -1]
    events: list[Event] = []
    evaluation: list[Event] = []
    later_failure = ""
    for event in map(event_on, lines):
        if event is None:
            continue
        if isinstance(event, Started) and evaluation_stage(event) is None:
            events, evaluation, later_failure = [event], [], ""
        elif isinstance(event, Started) or evaluation:
            evaluation = [event] if isinstance(event, Started) else [*evaluation, event]
            later_failure = event.error if isinstance(event, Failed) else ""
        elif isinstance(event, Failed) and any(not isinstance(each, Failed) for each in events):
            is_start = isinstance(events[-1], Completed | Failed) or event.category == "startup"
            is_start = is_start or event.step == 0 < last_step_of(events)
            later_failure = event.error if is_start else later_failure
            events += [] if is_start else [event]
        else:
            events.append(event)
    return events or evaluation, later_failure if events else ""


def last_step_of(events: list[Event]) -> int:
    """Return the number of completed steps, by the newest event that has a step."""
    return next((event.step for event in reversed(events) if not isinstance(event, Started)), 0)


def sketch(descriptor: int, name: str) -> list[float]:
    """Return at most `SKETCH_POINTS` finite values of a metric from all over the log, by ascending step.

    Only pieces of a long log are read, so that a thousand logs are sketched quickly.
    """
    size, mark = os.fstat(descriptor).st_size, b'"name":' + msgspec.json.encode(name)
    is_short = size <= SKETCH_POINTS * _PIECE_BYTES
    begins = [0] if is_short else [(size - _PIECE_BYTES) * at // (SKETCH_POINTS - 1) for at in range(SKETCH_POINTS)]
    points: list[tuple[int, float]] = []
    for begin in begins:
        piece = os.pread(descriptor, size if is_short else _PIECE_BYTES, begin)
        for at in _places(piece, mark):
            event = _line_at(piece, at)[1]
            if isinstance(event, Metric) and math.isfinite(event.number):
                while points and points[-1][0] >= event.step:  # a restart repeats these steps
                    points.pop()
                points.append((event.step, event.number))
                if not is_short:
                    break
    last = len(points) - 1
    few = range(last + 1) if last < SKETCH_POINTS else [last * at // (SKETCH_POINTS - 1) for at in range(SKETCH_POINTS)]
    return [float(f"{points[at][1]:.4g}") for at in few]
