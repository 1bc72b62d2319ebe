"""Reading an event log, also while it is being written and after a crash."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterable, Iterator
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import msgspec

from ...adapter.contract.exceptions import EventLogError
from .event import (
    MAX_STEP,
    RESUMED_METRIC,
    ROLLED_BACK_METRIC,
    SCHEMA_VERSION,
    TERMINAL_EVENTS,
    Event,
    Metric,
    Started,
    decode_event,
    decode_events,
)

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "LONGEST_LINE",
    "Position",
    "count_started",
    "decode_line",
    "decode_object",
    "follow",
    "last_seq",
    "log_of_run",
    "read_events",
    "read_metrics",
    "typed_events",
    "whole_lines",
]

_LINES_AT_ONCE = 4096
LONGEST_LINE = 16 << 20
"""Bytes of a line that is read: no run writes nearly as many, and a log may come from elsewhere."""
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def log_of_run(run: str | os.PathLike[str]) -> Path:
    """The event log of `run`, which is the log itself or a run's artifacts directory; it may be absent."""
    path = Path(run)
    candidates = [path / "metrics" / "events.jsonl", path / "events.jsonl"] if path.is_dir() else []
    return next((log for log in candidates if log.is_file()), path)


def decode_object(line: bytes) -> dict[str, Any]:
    """The JSON object on a line.

    Raises:
        ValueError: It is not one JSON object in UTF-8.
    """
    try:
        return _decode(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a log, oldest first, as dictionaries.

    A last line without its newline is not an event yet (it is being written, or was torn) and is left out.

    Raises:
        EventLogError: The log is absent or unreadable, or a line within it is not a JSON object.
    """
    lines = whole_lines(path)
    return (decode_line(path, number, line) for number, line in lines)


class Position(msgspec.Struct):
    """How far a follower has read: which file, whole lines, and where the last of them ends."""

    file: tuple[int, int] | None = None
    """Device and inode; None before the first line was read."""
    line: int = 0
    offset: int = 0

    def is_of(self, path: str | os.PathLike[str]) -> bool:
        """Whether the file at `path` is the one that was read, as far as it was read, and no newer one."""
        try:
            status = os.stat(path)
        except OSError:
            return self.file is None
        return self.file in (None, (status.st_dev, status.st_ino)) and status.st_size >= self.offset


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
    lines = _whole_lines(path, position)
    while block := list(islice(lines, _LINES_AT_ONCE)):
        try:
            decoded = decode_events(b"".join(block))
        except (ValueError, RecursionError):
            decoded = []
        if len(decoded) != len(block):  # a line is broken, or empty
            yield from _one_by_one(path, block, position.line + 1 - len(block), strict=strict)
        else:
            yield from decoded


def _one_by_one(path: str | os.PathLike[str], lines: Iterable[bytes], first: int, *, strict: bool) -> Iterator[Event]:
    for number, line in enumerate(lines, start=first):
        try:
            yield decode_event(line)
        except (ValueError, RecursionError) as error:
            if strict:
                raise _broken(path, number, "an event", error) from error
            if b"\0" not in line:
                decode_line(path, number, line)


def read_metrics(
    run: str | os.PathLike[str], *, run_id: str | None = None, all_attempts: bool = False
) -> pyarrow.Table:
    """The metrics of a run as a table, in the order in which they were logged; also while it is being written.

    ===========  ===================================================================================
    run_id       dictionary of string
    attempt      int64, from 1
    step         int64, completed steps
    timestamp    timestamp[ms, UTC]
    name         dictionary of string
    value        float64, with nan and infinities
    ===========  ===================================================================================

    Args:
        run: An event log, or the artifacts directory of a run.
        run_id: The run of a log that holds several; None takes all of them.
        all_attempts: Whether steps that a resumed attempt made again, or that a roll-back undid, are in it as well.
            Otherwise each step is there as it was made last.

    Raises:
        EventLogError: The log is absent or unreadable, or a line is not JSON.
    """
    import pyarrow as pa

    runs: dict[str, _Rows] = {}
    for event in typed_events(log_of_run(run), strict=False):
        if run_id not in {None, event.run_id}:
            continue
        if isinstance(event, Started):
            rows = runs.setdefault(event.run_id, _Rows())
            rows.attempt, rows.is_new_attempt = rows.attempt + 1, True
        elif isinstance(event, Metric):
            runs.setdefault(event.run_id, _Rows()).add(event, all_attempts=all_attempts)
    tables = [rows.table(name) for name, rows in runs.items()]
    return pa.concat_tables(tables or [_Rows().table("")]).unify_dictionaries().combine_chunks()


class _Rows:
    """The metrics of one run, in columns."""

    def __init__(self) -> None:
        self.attempt = 0
        self.is_new_attempt = False
        self._numbers: dict[str, int] = {}
        self._columns: list[array[Any]] = [array("q"), array("q"), array("q"), array("q"), array("d")]
        """Attempts, steps, times, numbers of names, and values."""

    def add(self, event: Metric, *, all_attempts: bool) -> None:
        goes_back_to: float | None = None
        if self.is_new_attempt:  # one that logs nothing, as the job has finished, takes nothing back
            goes_back_to = event.step if event.name == RESUMED_METRIC else 0
            self.is_new_attempt = False
        elif event.name == ROLLED_BACK_METRIC:
            goes_back_to = event.number
        if goes_back_to is not None and not all_attempts:
            kept = [step <= goes_back_to for step in self._columns[1]]
            if not all(kept):
                self._columns = [array(column.typecode, compress(column, kept)) for column in self._columns]
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


def whole_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """The lines of a log that end with a newline, with their numbers from 1.

    Raises:
        EventLogError: The log is absent or unreadable.
    """
    _open(path).close()  # an absent log is reported here and not at the first line
    position = Position()
    return ((position.line, line) for line in _whole_lines(path, position))


def _whole_lines(path: str | os.PathLike[str], position: Position) -> Iterator[bytes]:
    """The lines beyond `position`, which moves along, as far as they end with a newline: the rest may come any time."""
    with _open(path) as file:
        status = os.fstat(file.fileno())
        position.file = status.st_dev, status.st_ino
        file.seek(position.offset)
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise EventLogError(
                    f"line {position.line + 1} of event log {os.fspath(path)!s} has more than {LONGEST_LINE >> 20} "
                    "MiB, which no run writes; cut it out, or use another log"
                )
            if not line.endswith(b"\n"):
                return
            position.line += 1
            position.offset += len(line)
            yield line


def follow(
    path: str | os.PathLike[str], *, stop: threading.Event | None = None, poll_every_s: float = 0.2
) -> Iterator[dict[str, Any]]:
    """The events of a log as they come, from its first line to the end of its last attempt.

    Waits for a log that is not there yet, and goes over to a new file that takes the place of the old one.

    Args:
        path: The log.
        stop: Ends the iteration when set.
        poll_every_s: Seconds between two looks at the file.

    Raises:
        EventLogError: The log is unreadable, or a line within it is not a JSON object.
    """
    stop = stop or threading.Event()
    position = Position()
    while not stop.is_set():
        ended = False
        if not position.is_of(path):
            position = Position()
        for line in _whole_lines(path, position) if os.path.exists(path) else ():
            event = decode_line(path, position.line, line)
            yield event
            ended = event.get("event") in TERMINAL_EVENTS
        if ended:
            return
        stop.wait(poll_every_s)


def count_started(path: str | os.PathLike[str], run_id: str) -> int:
    """How many attempts of a run the log has seen start; of a long log hardly a line is parsed."""
    with open(path, "rb") as file:
        return sum(_starts(line, run_id) for line in file if b"started" in line and line.endswith(b"\n"))


def _starts(line: bytes, run_id: str) -> bool:
    try:
        event = decode_object(line)
    except ValueError:  # a line that is broken
        return False
    return event.get("event") == "started" and event.get("run_id") == run_id


class _Tail(msgspec.Struct):
    """The facts about the last line that a new writer needs."""

    seq: int
    schema_version: Literal["trainer_event.v1"]


def last_seq(line: bytes | None, path: str | os.PathLike[str]) -> int:
    """`seq` of the last whole line of the log at `path`; 0 where it has none.

    Raises:
        EventLogError: It is not a line of an event log.
    """
    if line is None:
        return 0
    try:
        return msgspec.json.decode(line, type=_Tail).seq
    except ValueError as error:
        raise EventLogError(
            f"{path} is not an event log of {SCHEMA_VERSION}: its last line says otherwise ({error}); "
            "move it aside, or write to another file"
        ) from error


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise EventLogError(f"cannot read event log {os.fspath(path)!s}: {error.strerror}") from error


def decode_line(path: str | os.PathLike[str], number: int, line: bytes) -> dict[str, Any]:
    """The JSON object on a line of the file at `path`.

    Raises:
        EventLogError: It is none; names the line.
    """
    try:
        return _decode(line)
    except (ValueError, RecursionError) as error:
        raise _broken(path, number, "a JSON object", error) from error


def _broken(path: str | os.PathLike[str], number: int, kind: str, error: Exception) -> EventLogError:
    why = "nested too deeply" if isinstance(error, RecursionError) else error
    return EventLogError(
        f"line {number} of event log {os.fspath(path)!s} is not {kind} ({why}); "
        "`genlight events FILE --check` lists every fault"
    )
