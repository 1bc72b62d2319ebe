"""Files of JSON lines. One process writes at a time, any process may read, and readers see only complete lines.

The lock is on the file itself, so no lock file can go stale. Lines that are appended together reach the kernel in one
``write``, so a killed process leaves no incomplete line. A full disk or a power cut may leave one: readers skip it, and
the next writer cuts it off.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...adapter.contract.exceptions import EventLogError
from ...adapter.plumbing.durable import fsync_directory, make_directory, write_all
from ...adapter.plumbing.safe_open import file_mode, open_regular

if TYPE_CHECKING:
    from ...adapter.plumbing.file_lock import FileLock


LONGEST_LINE = 16 << 20
"""Maximum size of a line in bytes. No run writes longer lines, but a log may come from an unknown source."""
StrPath = str | os.PathLike[str]
_encode_lines = msgspec.json.Encoder(order="sorted").encode_lines
decode_object = msgspec.json.Decoder(dict[str, Any]).decode
"""Return the JSON object on a line. Raises ValueError, or RecursionError if it is nested too deeply."""


def encode_json(value: object) -> bytes:
    """Return compact JSON with sorted keys. Numbers that are not finite become null.

    Lone surrogates in strings become backslash escapes, as in `storable`.
    """
    return encode_lines([value])[:-1]


def encode_lines(values: Sequence[object]) -> bytes:
    """Return a line for each of `values`: the result of `encode_json` and a newline."""
    values = list(values)  # msgspec 0.22 never releases the iterator of an iterable that is not a list
    try:
        return _encode_lines(values)
    except UnicodeEncodeError:
        return _encode_lines(storable(msgspec.to_builtins(values)))


def storable(value: Any) -> Any:
    """Return the value with lone surrogates in its texts escaped, since UTF-8 cannot encode them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {storable(key): storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list | tuple) else value


def decode_line(path: StrPath, number: int, line: bytes, decode: Callable[[bytes], Any] = decode_object) -> Any:
    """Return `decode(line)`, for a line of the file at `path`.

    Raises:
        EventLogError: The line cannot be decoded; the message names it.
    """
    try:
        return decode(line)
    except (ValueError, RecursionError) as error:
        raise EventLogError(
            f"line {number} of event log {os.fspath(path)!s} is broken: {error}; `genlight events RUN --check` lists "
            "every fault"
        ) from error


class Position(msgspec.Struct):
    """Position of a reader: the file, the number of complete lines read, and the offset of their end."""

    file: tuple[int, int] | None = None
    """Device and inode; None before the first line was read."""
    line: int = 0
    offset: int = 0

    def is_of(self, path: StrPath) -> bool:
        """Return whether the file at `path` is still the one that was read, and has not become shorter."""
        try:
            status = os.stat(path)
        except OSError:
            return self.file is None
        return self.file in (None, (status.st_dev, status.st_ino)) and status.st_size >= self.offset


def has_long_holes(descriptor: int) -> bool:
    """Return whether the holes of a sparse file have together more bytes than `LONGEST_LINE`.

    Such a file takes no space on disk, but a reader gets gigabytes from it. Shorter holes are accepted, because a power
    cut can leave a few unwritten blocks. The result is False on a file system that does not report holes.
    """
    size, at, total = os.fstat(descriptor).st_size, 0, 0
    while at < size and total <= LONGEST_LINE and hasattr(os, "SEEK_DATA"):
        try:
            data = os.lseek(descriptor, at, os.SEEK_DATA)
            after = os.lseek(descriptor, data, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system does not report holes
                return False
            data = after = size  # no data follows
        total += data - at
        at = after
    return total > LONGEST_LINE


def complete_lines(path: StrPath, position: Position) -> Iterator[bytes]:
    """Yield the complete lines after `position` and advance it. A last line without a newline is not read yet.

    Raises:
        EventLogError: The file is absent or unreadable, or a line, or the holes of the file, have more than 16 MiB.
    """
    try:
        file = os.fdopen(open_regular(path), "rb")
    except OSError as error:
        raise EventLogError(f"cannot read event log {os.fspath(path)!s}: {error.strerror}") from error
    with file:
        status = os.fstat(file.fileno())
        position.file = status.st_dev, status.st_ino
        if has_long_holes(file.fileno()):
            raise EventLogError(
                f"event log {os.fspath(path)!s} has {status.st_size:,} bytes, and more than {LONGEST_LINE >> 20} MiB "
                "of them were never written. No run leaves such a file; use another log"
            )
        file.seek(position.offset)
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise EventLogError(
                    f"line {position.line + 1} of event log {os.fspath(path)!s} has more than {LONGEST_LINE >> 20} "
                    "MiB. No run writes such lines; remove it, or use another log"
                )
            if not line.endswith(b"\n"):
                return
            position.line += 1
            position.offset += len(line)
            yield line


class LineFile:
    """Appends complete lines to a file that only this process may write.

    Only `sync` is thread-safe: the caller must serialize `append` and `close`. In a forked child the file is closed, so
    that a data loader worker that outlives its parent cannot keep the lock. A copy of this object is closed from the
    start, and the original stays open.

    Attributes:
        path: The file.
        last: The last complete line of the file when it was opened, decoded; None if there was none.
        size: Bytes of the file.
        lines: Number of lines appended since it was opened.

    Args:
        path: The file; it and its directories are created if absent.
        decode: Decodes the last line; a ValueError from it means that the file is not of the expected kind.
        tries: How often to try to take the lock, 50 ms apart; more than 1 for a file that its
            writers open for a single line, as in `reporters/telemetry.py`.

    Raises:
        EventLogError: Another writer has locked the file, it cannot be opened, or it has other content.
    """

    def __init__(self, path: StrPath, decode: Callable[[bytes], Any] = decode_object, *, tries: int = 1) -> None:
        # Imported here, so that files can be read on systems without such locks.
        from ...adapter.plumbing.file_lock import FileLock, LockHeldError, NoLocksError, holding_process

        self.path = Path(path)
        self.lines, self._torn = 0, False
        try:
            _make_folder(self.path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._lock: FileLock | None = FileLock(self.path, flags, file_mode(self.path.parent), tries=tries)
        except LockHeldError as error:
            pid = holding_process(path)
            by = f"process {pid}" if pid else "another process"
            raise EventLogError(f"{path} is being written by {by}; stop it, or write to another file") from error
        except OSError as error:
            why = (
                f"its file system has no locks, {error.strerror}" if isinstance(error, NoLocksError) else error.strerror
            )
            raise EventLogError(f"cannot open {path}: {why}; correct that, or write to another file") from error
        try:
            if has_long_holes(self._descriptor):
                raise ValueError(f"more than {LONGEST_LINE >> 20} MiB of it were never written")
            line, self.size = _last_complete_line(self._descriptor)
            self.last = None if line is None else decode(line)
            if self.size != os.fstat(self._descriptor).st_size:
                self._cut_off()
                os.fsync(self._descriptor)
            if not self.size:  # if it has lines, its first writer has made its name durable
                fsync_directory(self.path.parent)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                why = f"{error.strerror}; correct that, or write to another file"
                raise EventLogError(f"cannot open {path}: {why}") from error
            if isinstance(error, (ValueError, RecursionError)):
                raise EventLogError(f"{path} has other content: {error}; write to another file") from error
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None}  # a lock belongs to one open file in one process

    @property
    def _descriptor(self) -> int:
        return -1 if self._lock is None else self._lock.descriptor

    @property
    def closed(self) -> bool:
        """Whether `append` would be refused."""
        return self._lock is None or self._lock.descriptor < 0

    @property
    def is_in_place(self) -> bool:
        """Whether `path` is still this file; False once it was removed or replaced."""
        try:
            return not self.closed and os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def append(self, lines: bytes, count: int = 1) -> None:
        """Write `count` lines, including their newlines, completely or not at all.

        Raises:
            EventLogError: The file is closed, or the lines could not be written and were removed again.
        """
        lock = self._lock
        if lock is None or lock.descriptor < 0:
            raise EventLogError(f"{self.path} is closed in process {os.getpid()}")
        if self._torn:
            self._cut_off()
        before = self.size, self.lines
        try:
            if (written := os.write(lock.descriptor, lines)) < len(lines):
                write_all(lock.descriptor, lines[written:])
            self.size, self.lines = self.size + len(lines), self.lines + count
        except BaseException as error:
            # The error may be a KeyboardInterrupt that came after the write: the line is then removed, too.
            self.size, self.lines = before
            self._torn = True
            with contextlib.suppress(EventLogError):  # the next append tries again and reports the error
                self._cut_off()
            if isinstance(error, OSError):
                raise EventLogError(f"cannot write to {self.path}: {error.strerror}") from error
            raise

    def sync(self) -> None:
        """Make every line so far durable.

        Raises:
            EventLogError: The device refused; the last lines may or may not be on it.
        """
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise EventLogError(f"cannot make {self.path} durable: {error.strerror}") from error

    def close(self) -> None:
        """Close the file and release its lock; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()

    def _cut_off(self) -> None:
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError as error:
            raise EventLogError(f"cannot cut a torn line off {self.path}: {error.strerror}") from error
        self._torn = False


def _make_folder(directory: Path) -> None:
    try:
        make_directory(directory, shared=None)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, f"{directory} is not a directory") from None


def _last_complete_line(descriptor: int) -> tuple[bytes | None, int]:
    """Return the last complete line, and the offset of its end."""
    if not os.fstat(descriptor).st_size:
        return None, 0
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            line = content[start:end]
            # JSON escapes NUL. A bare one belongs to a block that did not reach the disk before a power cut.
            if b"\0" not in line:
                return line, end
            end = start
        if content[:1] not in {b"{", b"\0"}:
            raise ValueError("it does not hold JSON lines")
    return None, 0
