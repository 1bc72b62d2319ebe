"""Output of the command line: control characters are escaped, and the reader may close the pipe early.

`say` and `print_error` write every line of a command. Names, notes and errors come from other people's files, so these
functions escape every character that could control a terminal (ESC, BEL, bidirectional controls, C1).

A run must not end because nobody can read its log any more (a closed pipe, a full disk). A listing must end quietly
when its reader has seen enough.
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
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from typing_extensions import Buffer, override

from ..check.finding import Finding, Level
from ..plumbing.failures import EXIT_STARTUP
from ..plumbing.redaction import redact
from ..plumbing.text import printable, shortened

if TYPE_CHECKING:
    from ..view.differences import ChangedFact

_WIDEST_VALUE = 60
"""Maximum width of a value in a table of differences, in characters."""

STYLES = {"ok": "\x1b[32m", "warning": "\x1b[33m", "fault": "\x1b[31m", "dim": "\x1b[2m"}
_MARKS: dict[Level, str] = {"pass": "ok", "warn": "warning", "fail": "fault", "skip": "skipped"}


def visible(text: object) -> str:
    """Return `text` with every character escaped that could control the terminal; line breaks stay."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def apply_style(text: object, style: str) -> str:
    """Return `visible` text; on a terminal, its first word (with ``dim``, all of it) gets a style of `STYLES`."""
    shown = visible(text)
    if style not in STYLES or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return shown
    word, blank, rest = (shown, "", "") if style == "dim" else shown.partition(" ")
    return f"{STYLES[style]}{word}\x1b[0m{blank}{rest}"


def say(*lines: object, style: str = "") -> None:
    """Write lines to standard output, each as `apply_style`, and flush."""
    sys.stdout.write("".join(f"{apply_style(line, style)}\n" for line in lines))
    sys.stdout.flush()


def say_json(objects: Iterable[Any]) -> None:
    """Write objects to standard output for other programs, one a line."""
    for each in objects:
        say(json.dumps(each, default=dict, sort_keys=True, separators=(",", ":")))


def brief(value: object, most: int = 100) -> str:
    """Return a value in one line of at most `most` characters."""
    text = printable(value if isinstance(value, str) else json.dumps(value, default=dict))
    return shortened(text, most)


def align_columns(rows: Iterable[Sequence[object]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def table_of(changes: Sequence[ChangedFact], names: Sequence[str]) -> list[str]:
    """Return a table of the differences between runs, grouped by kind under headings."""
    if not changes:
        return ["no known difference"]
    rows = [
        [f"  {each.name}", *("-" if v is None else brief(v, _WIDEST_VALUE) for v in each.values)] for each in changes
    ]
    header, *texts = align_columns([["", *names], *rows])
    lines = [header]
    for about, group in groupby(zip(changes, texts, strict=True), lambda each: each[0].about):
        lines += [about, *(text for _, text in group)]
    return lines


def say_finding(finding: Finding, *, width: int = 17, secrets: Sequence[str] = ()) -> None:
    """Write the outcome of a check and the way out, without `secrets`; `width` is the width of the check's name."""
    mark = _MARKS[finding.level]
    text = redact(f"{mark:<7}  {finding.check:<{width}}  {finding.detail}", secrets)
    say(text, style=mark if mark in STYLES else "dim")
    if finding.remedy:
        say(redact(f"{'':7}  {'':{width}}  → {finding.remedy}", secrets))


def print_error(command: str, text: object, code: int = EXIT_STARTUP) -> int:
    """Write an error of `command` to standard error, and return `code`. An empty `command` means a usage error."""
    sys.stderr.write(f"{f'genlight {command}' if command else 'error'}: {visible(text)}\n")
    return code


class VisibleFormatter(logging.Formatter):
    """Formats log messages with their level through `visible`, because they may contain text from files of others."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s: %(message)s")

    @override
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _NeverFails(io.FileIO):
    """A file whose writes always succeed; it drops output that cannot be written."""

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
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def escape_unencodable() -> None:
    """Escape characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def ignoring_broken_pipe() -> Iterator[None]:
    """Let standard output and error drop text that nobody reads, instead of raising `BrokenPipeError`."""
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
    """Return a version of `stream` that never fails, if it is a standard stream of the process."""
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
    """End quietly when the reader closes the pipe, as ``| head`` does.

    Raises:
        SystemExit: The disk is full; the code is 1.
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
        # Otherwise the interpreter would try to write the rest again at exit, and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_full:
            sys.stderr.write(f"genlight: the output cannot be written: {error.strerror}\n")
            raise SystemExit(1) from None
