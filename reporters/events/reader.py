"""Read an event log, also while it is being written and after a crash."""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Iterator
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...adapter.plumbing.safe_open import open_regular
from .event import (
    MAX_STEP,
    RESUMED_METRIC,
    ROLLED_BACK_METRIC,
    TERMINAL_EVENTS,
    Completed,
    Event,
    Failed,
    Metric,
    Started,
    decode_event,
    decode_events,
)
from .json_lines import LONGEST_LINE, Position, complete_lines, decode_line

if TYPE_CHECKING:
    import pyarrow


_LINES_AT_ONCE = 4096


def log_of_run(run: str | os.PathLike[str]) -> Path:
    """Return the event log of `run`, a log or the artifacts directory of a run; the log may be absent."""
    path = Path(run)
    candidates = [path / "metrics" / "events.jsonl", path / "events.jsonl"] if path.is_dir() else []
    return next((log for log in candidates if log.is_file()), path)


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a log, oldest first, as dictionaries.

    A last line without its newline is skipped: it is still being written, or was torn.

    Raises:
        EventLogError: The log is absent or unreadable, or one of its lines is not a JSON object.
    """
    position = Position()
    for line in complete_lines(path, position):
        yield decode_line(path, position.line, line)


def typed_events(
    path: str | os.PathLike[str], *, strict: bool = True, position: Position | None = None
) -> Iterator[Event]:
    """Yield the events of a log, oldest first, as structs: five times as fast as `read_events`.

    A last line without its newline is skipped, as in `read_events`.

    Args:
        path: The log.
        strict: Whether a line that is not an event is an error. Otherwise the line is skipped if it is a JSON object
            (another release may have written it) or has NUL bytes (a power cut leaves them).
        position: The position to continue from, in the same file. It is advanced, so that a later call reads only new
            lines.

    Raises:
        EventLogError: The log is absent or unreadable, or a line is not an event; the message names the line.
    """
    position = Position() if position is None else position
    lines = complete_lines(path, position)
    while block := list(islice(lines, _LINES_AT_ONCE)):
        try:
            decoded = decode_events(b"".join(block))
        except (ValueError, RecursionError):
            decoded = []
        if len(decoded) == len(block):
            yield from decoded
            continue
        for number, line in enumerate(block, start=position.line + 1 - len(block)):  # a line is broken or empty
            event = event_on(line)
            if event is not None:
                yield event
            elif strict:
                decode_line(path, number, line, decode_event)
            elif b"\0" not in line:
                decode_line(path, number, line)


def event_on(line: bytes) -> Event | None:
    """Return the event on a line; None if it is not an event."""
    try:
        return decode_event(line)
    except (ValueError, RecursionError):
        return None


def evaluation_stage(started: Started) -> str | None:
    """Return ``validate``, ``test`` or ``predict`` if that is all the attempt does; None if it trains."""
    metadata = started.metadata
    return metadata.get("stage") if isinstance(metadata, dict) else None


class Attempts:
    """Follows the events of one run and decides which earlier steps no longer count.

    All readers of a log use it, so that tables, curves and the account of time agree. The rule: once an attempt reports
    a step after the one from which it resumed, it replaces the steps that earlier attempts made after that point. So an
    attempt that only evaluates, or that ends before its first step, replaces nothing.
    """

    def __init__(self) -> None:
        self._resumed_from: int | None = None
        """The step from which the attempt resumed, until it trains another step; None if it only evaluates."""

    def take(self, event: Event) -> int | None:
        """Take the next event. If it undoes earlier steps, return the last step that still counts; otherwise None."""
        if isinstance(event, Started):
            self._resumed_from = 0 if evaluation_stage(event) is None else None
        elif isinstance(event, Metric) and event.name == RESUMED_METRIC:
            self._resumed_from = event.step
        elif isinstance(event, Metric) and event.name == ROLLED_BACK_METRIC:
            return int(event.number) if math.isfinite(event.number) else None
        elif (
            self._resumed_from is not None
            and event.step > self._resumed_from
            and not isinstance(event, Completed | Failed)  # a failure names the step that did not complete
        ):
            step, self._resumed_from = self._resumed_from, None
            return step
        return None


def read_metrics(run: str | os.PathLike[str], *, all_attempts: bool = False) -> pyarrow.Table:
    """Return the metrics of a run as a table, in the order of the log; the run may still be writing.

    ===========  ===================================================================================
    run_id       dictionary of string
    attempt      int64, from 1
    step         int64, completed steps
    timestamp    timestamp[ms, UTC]
    name         dictionary of string
    value        float64, with nan and infinities
    ===========  ===================================================================================

    Args:
        run: An event log, or the artifacts directory of a run. If a log has several runs, the table has all of them.
        all_attempts: Whether to include steps that a later attempt repeated, or that a roll-back undid. By default the
            table has only the newest version of each step.

    Raises:
        EventLogError: The log is absent or unreadable, or a line is not JSON.
    """
    import pyarrow as pa

    runs: dict[str, _Rows] = {}
    for event in typed_events(log_of_run(run), strict=False):
        if event.run_id:  # an attempt that failed before its run was known has no id
            rows = runs.setdefault(event.run_id, _Rows())
            undone_after = rows.attempts.take(event)
            if undone_after is not None and not all_attempts:
                rows.go_back(undone_after)
            if isinstance(event, Metric):
                rows.add(event)
            rows.attempt += isinstance(event, Started)
    tables = [rows.table(name) for name, rows in runs.items()]
    return pa.concat_tables(tables or [_Rows().table("")]).unify_dictionaries().combine_chunks()


class _Rows:
    """The metrics of one run, in columns."""

    def __init__(self) -> None:
        self.attempt = 0
        self.attempts = Attempts()
        self._numbers: dict[str, int] = {}
        self._columns: list[array[Any]] = [array("q"), array("q"), array("q"), array("q"), array("d")]
        """Attempts, steps, times, indices of names, and values."""

    def go_back(self, undone_after: int) -> None:
        """Remove the rows of later steps."""
        kept = [step <= undone_after for step in self._columns[1]]
        if not all(kept):
            self._columns = [array(column.typecode, compress(column, kept)) for column in self._columns]

    def add(self, event: Metric) -> None:
        """Append a row."""
        number = self._numbers.setdefault(event.name, len(self._numbers))
        row = (max(self.attempt, 1), event.step, min(event.timestamp_ms, MAX_STEP), number, event.number)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def table(self, run_id: str) -> pyarrow.Table:
        """Return the rows as a table of `read_metrics`."""
        import pyarrow as pa

        attempts, steps, times, numbers, values = (pa.array(column) for column in self._columns)
        names = pa.array(list(self._numbers), pa.string())
        return pa.table(
            {
                "run_id": pa.DictionaryArray.from_arrays(pa.array([0] * len(steps), pa.int32()), pa.array([run_id])),
                "attempt": attempts,
                "step": steps,
                "timestamp": times.cast(pa.timestamp("ms", "UTC")),
                "name": pa.DictionaryArray.from_arrays(numbers.cast(pa.int32()), names),
                "value": values,
            }
        )


def follow(path: str | os.PathLike[str], *, poll_every_s: float = 0.2) -> Iterator[dict[str, Any]]:
    """Yield the events of a log while it is written, from its first line to the end of its last attempt.

    Waits for a log that does not exist yet, and continues with the new file if the log is replaced.

    Args:
        path: The log.
        poll_every_s: Seconds between two checks of the file.

    Raises:
        EventLogError: The log is unreadable, or one of its lines is not a JSON object.
    """
    position, ended = Position(), False
    while not ended:
        if not position.is_of(path):
            position = Position()
        for line in complete_lines(path, position) if os.path.exists(path) else ():
            event = decode_line(path, position.line, line)
            yield event
            ended = str(event.get("event")) in TERMINAL_EVENTS
        if not ended:
            time.sleep(poll_every_s)


def starts_of(path: str | os.PathLike[str], run_id: str) -> list[Started]:
    """Return the ``started`` events of a run, oldest first; few other lines are parsed."""
    with os.fdopen(open_regular(path), "rb") as file:
        # A longer line is not an event, and is not read into memory.
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        events = [event_on(line) for line in lines if b"started" in line and line.endswith(b"\n")]
    return [event for event in events if isinstance(event, Started) and event.run_id == run_id]
