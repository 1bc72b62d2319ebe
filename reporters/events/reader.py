"""Reading an event log, also while it is being written and after a crash."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from ...adapter.contract.exceptions import EventLogError
from .lines import SCHEMA_VERSION, TERMINAL_EVENTS

__all__ = ["count_started", "decode_blocks", "decode_object", "follow", "last_seq", "read_events", "whole_lines"]

# A quote within a JSON string is escaped, so these bytes are never part of a text.
_STARTED = re.compile(rb'"event"\s*:\s*"started"')
_BLOCK_BYTES = 1 << 20
_Decoded = TypeVar("_Decoded")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


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
    return (_event(path, number, line) for number, line in lines)


def decode_blocks(
    path: str | os.PathLike[str], decoder: msgspec.json.Decoder[_Decoded], kind: str
) -> Iterator[list[_Decoded]]:
    """The whole lines of a log as `decoder` has them, many at a time: five times as fast as one by one.

    Raises:
        EventLogError: The log is absent or unreadable, or a line is not a `kind`; the file and the line are named.
    """
    number = 1
    with _open(path) as file:
        while lines := file.readlines(_BLOCK_BYTES):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            try:
                decoded = decoder.decode_lines(b"".join(lines))
            except (ValueError, RecursionError):
                decoded = []
            if len(decoded) != len(lines):  # a line is broken, or empty
                decoded = [_decoded(decoder.decode, path, number + i, line, kind) for i, line in enumerate(lines)]
            yield decoded
            number += len(lines)


def whole_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """The lines of a log that end with a newline, with their numbers from 1.

    Raises:
        EventLogError: The log is absent or unreadable.
    """
    _open(path).close()  # an absent log is reported here and not at the first line
    return _numbered(path)


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
    position = _Position()
    while not stop.is_set():
        ended = False
        for event in _new_events(path, position):
            yield event
            ended = event.get("event") in TERMINAL_EVENTS
        if ended:
            return
        stop.wait(poll_every_s)


def count_started(path: str | os.PathLike[str], run_id: str) -> int:
    """How many attempts of a run the log has seen start; a long log is searched, not parsed."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return sum(line.get("run_id") == run_id for line in _started_lines(content))


def _started_lines(content: mmap.mmap) -> Iterator[dict[str, Any]]:
    """The whole lines of a log that are ``started``; each is parsed once, whatever it holds."""
    position = 0
    while match := _STARTED.search(content, position):
        start, end = content.rfind(b"\n", position, match.start()) + 1 or position, content.find(b"\n", match.start())
        if end < 0:
            return
        position = end + 1
        with contextlib.suppress(ValueError):  # a line that is broken
            event = decode_object(content[start:end])
            if event.get("event") == "started":
                yield event


class _Tail(msgspec.Struct):
    """What a new writer needs to know of the last line."""

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


class _Position(msgspec.Struct):
    """How far a follower has read: which file, whole lines, and where the last of them ends."""

    file: tuple[int, int] | None = None
    line: int = 0
    offset: int = 0


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise EventLogError(f"cannot read event log {os.fspath(path)!s}: {error.strerror}") from error


def _numbered(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _event(path: str | os.PathLike[str], number: int, line: bytes) -> dict[str, Any]:
    return _decoded(_decode, path, number, line, "a JSON object")


def _decoded(
    decode: Callable[[bytes], _Decoded], path: str | os.PathLike[str], number: int, line: bytes, kind: str
) -> _Decoded:
    try:
        return decode(line)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise EventLogError(
            f"line {number} of event log {os.fspath(path)!s} is not {kind} ({why}); "
            "`genlight events FILE --check` lists every fault"
        ) from error


def _new_events(path: str | os.PathLike[str], position: _Position) -> Iterator[dict[str, Any]]:
    """Whole lines beyond `position`, which moves along."""
    if not os.path.exists(path):
        return
    with _open(path) as file:
        status = os.fstat(file.fileno())
        if position.file != (status.st_dev, status.st_ino) or status.st_size < position.offset:
            position.file, position.line, position.offset = (status.st_dev, status.st_ino), 0, 0
        file.seek(position.offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position.line += 1
            position.offset += len(line)
            yield _event(path, position.line, line)
