"""Reading an event log, also while it is being written and after a crash."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...adapter.plumbing.safe_open import open_regular
from .attempts import Attempts
from .event import MAX_STEP, TERMINAL_EVENTS, Event, Metric, Started, decode_event, decode_events
from .json_lines import LONGEST_LINE, Position, decode_line, whole_lines

if TYPE_CHECKING:
    import pyarrow

__all__ = ["count_started", "follow", "log_of_run", "read_events", "read_metrics", "starts_of", "typed_events"]

_LINES_AT_ONCE = 4096


def log_of_run(run: str | os.PathLike[str]) -> Path:
    """The event log of `run`, which is the log itself or a run's artifacts directory; it may be absent."""
    path = Path(run)
    candidates = [path / "metrics" / "events.jsonl", path / "events.jsonl"] if path.is_dir() else []
    return next((log for log in candidates if log.is_file()), path)


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a log, oldest first, as dictionaries.

    A last line without its newline is not an event yet (it is being written, or was torn) and is left out.

    Raises:
        EventLogError: The log is absent or unreadable, or a line within it is not a JSON object.
    """
    position = Position()
    for line in whole_lines(path, position):
        yield decode_line(path, position.line, line)


def typed_events(
    path: str | os.PathLike[str], *, strict: bool = True, position: Position | None = None
) -> Iterator[Event]:
    """The events of a log, oldest first, as structs: five times as fast as `read_events`.

    A last line without its newline is left out, as by `read_events`.

    Args:
        path: The log.
        strict: Whether a line that is no event is an error. Otherwise it is passed over if it is a JSON object, as
            another release may have written it, or has NUL bytes, as a power cut leaves them.
        position: Where to go on, of the same file; moved along, for those who come back for what was added.

    Raises:
        EventLogError: The log is absent or unreadable, or a line is not an event; names the line.
    """
    position = Position() if position is None else position
    lines = whole_lines(path, position)
    while block := list(islice(lines, _LINES_AT_ONCE)):
        try:
            decoded = decode_events(b"".join(block))
        except (ValueError, RecursionError):
            decoded = []
        if len(decoded) == len(block):
            yield from decoded
            continue
        for number, line in enumerate(block, start=position.line + 1 - len(block)):  # one is broken, or empty
            event = _decoded(line)
            if event is not None:
                yield event
            elif strict:
                decode_line(path, number, line, decode_event)
            elif b"\0" not in line:
                decode_line(path, number, line)


def _decoded(line: bytes) -> Event | None:
    """The event of a line; None where it is none."""
    try:
        return decode_event(line)
    except (ValueError, RecursionError):
        return None


def read_metrics(run: str | os.PathLike[str], *, all_attempts: bool = False) -> pyarrow.Table:
    """The metrics of a run as a table, in the order in which they were logged; the run may still be writing.

    ===========  ===================================================================================
    run_id       dictionary of string
    attempt      int64, from 1
    step         int64, completed steps
    timestamp    timestamp[ms, UTC]
    name         dictionary of string
    value        float64, with nan and infinities
    ===========  ===================================================================================

    Args:
        run: An event log, or the artifacts directory of a run. Of a log with several runs the table has all.
        all_attempts: Whether to include steps that a later attempt made again, or that a roll-back undid. By default
            the table has each step as it was made last.

    Raises:
        EventLogError: The log is absent or unreadable, or a line is not JSON.
    """
    import pyarrow as pa

    runs: dict[str, _Rows] = {}
    for event in typed_events(log_of_run(run), strict=False):
        if event.run_id:  # a start may have failed before it knew its run
            rows = runs.setdefault(event.run_id, _Rows())
            undone_after = rows.attempts.goes_back_to(event)
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
        """Attempts, steps, times, numbers of names, and values."""

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
    """The events of a log as they come, from its first line to the end of its last attempt.

    Waits for a log that is not there yet, and goes over to a new file that takes the place of the old one.

    Args:
        path: The log.
        poll_every_s: Seconds between two looks at the file.

    Raises:
        EventLogError: The log is unreadable, or a line within it is not a JSON object.
    """
    position, ended = Position(), False
    while not ended:
        if not position.is_of(path):
            position = Position()
        for line in whole_lines(path, position) if os.path.exists(path) else ():
            event = decode_line(path, position.line, line)
            yield event
            ended = event.get("event") in TERMINAL_EVENTS
        if not ended:
            time.sleep(poll_every_s)


def count_started(path: str | os.PathLike[str], run_id: str) -> int:
    """How many attempts of a run the log has seen start."""
    return len(starts_of(path, run_id))


def starts_of(path: str | os.PathLike[str], run_id: str) -> list[Started]:
    """The ``started`` events of a run, oldest first; of a long log hardly a line is parsed."""
    with os.fdopen(open_regular(path), "rb") as file:
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")  # a longer one is no event, and takes no memory
        events = [_decoded(line) for line in lines if b"started" in line and line.endswith(b"\n")]
    return [event for event in events if isinstance(event, Started) and event.run_id == run_id]
