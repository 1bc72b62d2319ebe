"""Output of the command line: any character is made visible, and a reader may leave before the end.

`say` and `print_error` write every line that a command writes. Names, notes and errors come from files of others, so no
character that could command a terminal (ESC, BEL, bidirectional controls, C1) passes them.

A run must not end because its log is no longer read (a closed pipe, a full disk), and a listing must end quietly when
its reader has seen enough.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from typing_extensions import Buffer, override

from ..check.finding import Finding, Level
from ..plumbing.failures import EXIT_STARTUP
from ..plumbing.redaction import redact
from ..plumbing.text import printable, shortened

__all__ = [
    "VisibleFormatter",
    "aligned",
    "brief",
    "print_error",
    "fill_closed_descriptors",
    "escape_unencodable",
    "ignoring_broken_pipe",
    "say",
    "say_finding",
    "say_json",
    "styled",
    "exit_on_broken_pipe",
    "visible",
]


STYLES = {"ok": "\x1b[32m", "warning": "\x1b[33m", "fault": "\x1b[31m", "dim": "\x1b[2m"}
_MARKS: dict[Level, str] = {"pass": "ok", "warn": "warning", "fail": "fault", "skip": "skipped"}


def visible(text: object) -> str:
    """`text` with every character escaped that could control the terminal; line breaks stay."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def styled(text: object, style: str) -> str:
    """`text` as `visible`; on a terminal its first word, or with ``dim`` all of it, has a style of `STYLES`."""
    shown = visible(text)
    if style not in STYLES or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return shown
    word, blank, rest = (shown, "", "") if style == "dim" else shown.partition(" ")
    return f"{STYLES[style]}{word}\x1b[0m{blank}{rest}"


def say(*lines: object, style: str = "") -> None:
    """Write lines to standard output, at once, each as `styled`."""
    sys.stdout.write("".join(f"{styled(line, style)}\n" for line in lines))
    sys.stdout.flush()


def say_json(objects: Iterable[Any]) -> None:
    """Write objects to standard output for other programs, one a line."""
    for each in objects:
        say(json.dumps(each, default=dict, sort_keys=True, separators=(",", ":")))


def brief(value: object, most: int = 100) -> str:
    """A value in one line of at most `most` characters."""
    text = printable(value if isinstance(value, str) else json.dumps(value, default=dict))
    return shortened(text, most)


def aligned(rows: Iterable[Sequence[object]]) -> list[str]:
    """Rows as lines with aligned columns."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def say_finding(finding: Finding, *, width: int = 17, secrets: Sequence[str] = ()) -> None:
    """Write the outcome of a check and the way out, without `secrets`; `width` is that of the names of checks."""
    mark = _MARKS[finding.level]
    text = redact(f"{mark:<7}  {finding.check:<{width}}  {finding.detail}", secrets)
    say(text, style=mark if mark in STYLES else "dim")
    if finding.remedy:
        say(redact(f"{'':7}  {'':{width}}  → {finding.remedy}", secrets))


def print_error(command: str, text: object, code: int = EXIT_STARTUP) -> int:
    """Write what is wrong to standard error, and return `code`; an empty `command` stands for how it was called."""
    sys.stderr.write(f"{f'genlight {command}' if command else 'error'}: {visible(text)}\n")
    return code


class VisibleFormatter(logging.Formatter):
    """Messages with the name of their level, through `visible`: they too contain names and errors of others."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s: %(message)s")

    @override
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _NeverFails(io.FileIO):
    """A file whose writes always succeed; what cannot be written is dropped."""

    @override
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def fill_closed_descriptors() -> None:
    """Open the null device for each closed standard stream; otherwise the next opened file would take its place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for as long as the process


def escape_unencodable() -> None:
    """Escape characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def ignoring_broken_pipe() -> Iterator[None]:
    """Standard output and error drop what nobody reads, instead of raising `BrokenPipeError`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lossy(sys.stdout, 1), _lossy(sys.stderr, 2)
    try:
        yield
    finally:
        for lossy, stream in zip((sys.stdout, sys.stderr), before, strict=True):
            if lossy is not stream:
                lossy.flush()
        sys.stdout, sys.stderr = before


def _lossy(stream: TextIO, descriptor: int) -> TextIO:
    """`stream` without failures, if it is the process's own."""
    if not isinstance(stream, io.TextIOWrapper) or getattr(stream, "name", "") not in ("<stdout>", "<stderr>"):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_NeverFails(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


@contextlib.contextmanager
def exit_on_broken_pipe() -> Iterator[None]:
    """End quietly when the reader of the output has gone, as after ``| head``.

    Raises:
        SystemExit: With 1: the output cannot be written for another reason.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        is_full = error.errno == errno.ENOSPC and error.filename is None
        if not is_full and not isinstance(error, BrokenPipeError):
            raise
        # Else the interpreter would try to write what is left once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_full:
            sys.stderr.write(f"genlight: the output cannot be written: {error.strerror}\n")
            raise SystemExit(1) from None
