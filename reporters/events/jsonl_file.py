"""A file of JSON lines with one writer, whole lines only.

The lock is on the file itself, so there is no lock file to go stale. A line reaches the kernel in one ``write``:
a killed process leaves either all of it or nothing. What a full disk or a power cut tore is cut off, never continued.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import Self

from ...adapter.contract.exceptions import EventLogError
from ...adapter.plumbing.durable import fsync_directory, write_all
from ...adapter.plumbing.file_lock import FileLock, LockHeldError, NoLocksError
from .reader import decode_object

__all__ = ["LineFile"]


class LineFile:
    """Appends whole lines to a file that this process alone may write.

    Not thread-safe but for `sync`: the caller serialises `append` and `close`. In a forked child, and in a copy, the
    file is closed, as its lock is.

    Attributes:
        path: The file.
        last_line: The last whole line that was there when it was opened, or None.
        size: Bytes of the file.
        lines: Lines that were appended since it was opened.

    Args:
        path: The file; it and its directories are created when absent.
        tries: How often to try for the lock, 50 ms apart, where other writers hold it for a line only.

    Raises:
        EventLogError: The file is locked by another writer, cannot be opened, or holds something else than JSON lines.
    """

    def __init__(self, path: str | os.PathLike[str], *, tries: int = 1) -> None:
        self.path = Path(path)
        self._lock = _locked(self.path, tries)
        self._torn = False
        self.lines = 0
        try:
            self.last_line, self.size = _cut_torn_tail(self._lock.descriptor, self.path)
            if not self.size:  # with lines in it, the process that began the file has made its name durable
                fsync_directory(self.path.parent)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise EventLogError(f"cannot open {self.path}: {error.strerror}") from error
            raise

    @property
    def closed(self) -> bool:
        """Whether `append` would be refused."""
        return self._lock.descriptor < 0

    def append(self, line: bytes) -> None:
        """Write a line, which ends with its newline, whole or not at all.

        Raises:
            EventLogError: The file is closed, or the line could not be written; the file then ends with the one before.
        """
        if self.closed:
            raise EventLogError(f"{self.path} is closed in process {os.getpid()}")
        if self._torn:
            self._cut_off()
        before = self.size, self.lines
        try:
            write_all(self._lock.descriptor, line)
            self.size, self.lines = self.size + len(line), self.lines + 1
        except BaseException as error:
            # Also for a KeyboardInterrupt that lands between a write and its bookkeeping.
            self.size, self.lines = before
            self._torn = True
            with contextlib.suppress(EventLogError):  # the next append tries again, or reports that it cannot
                self._cut_off()
            if isinstance(error, OSError):
                raise EventLogError(f"cannot write to {self.path}: {error.strerror}") from error
            raise

    def sync(self) -> None:
        """Make every line so far durable.

        Raises:
            EventLogError: The device refused; what it holds of the last lines is unknown.
        """
        try:
            os.fdatasync(self._lock.descriptor)
        except OSError as error:
            raise EventLogError(f"cannot make {self.path} durable: {error.strerror}") from error

    def close(self) -> None:
        """Give up the file and its lock; a second call does nothing."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut_off(self) -> None:
        try:
            os.ftruncate(self._lock.descriptor, self.size)
        except OSError as error:
            raise EventLogError(f"cannot cut a torn line off {self.path}: {error.strerror}") from error
        self._torn = False


def _locked(path: Path, tries: int) -> FileLock:
    try:
        _make_directories(path.parent)
        return FileLock(path, tries=tries, flags=os.O_RDWR | os.O_CREAT | os.O_APPEND, mode=0o644)
    except LockHeldError as error:
        by = f"process {error.pid}" if error.pid else "another process"
        raise EventLogError(f"{path} is being written by {by}; stop it, or write to another file") from error
    except NoLocksError as error:
        raise EventLogError(
            f"cannot lock {path}: {error.strerror}; its file system must support flock, or write to another one"
        ) from error
    except OSError as error:
        raise EventLogError(f"cannot open {path}: {error.strerror}") from error


def _make_directories(directory: Path) -> None:
    """Create `directory` and make every new name on the way durable."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        if directory == directory.parent:
            break
        directory = directory.parent
    for new in reversed(missing):
        try:
            new.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, f"{new} is not a directory") from None
        fsync_directory(new.parent)


def _cut_torn_tail(descriptor: int, path: Path) -> tuple[bytes | None, int]:
    """Cut off what is not a whole line; the last whole line (None without one) and the size that remains."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return None, 0
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        line, end = _last_whole_line(content)
        if line is None and content[:1] not in {b"{", b"\0"}:
            raise EventLogError(f"{path} does not hold JSON lines; move it aside, or write to another file")
    if line is not None:
        _check_object(line, path)
    if end != size:
        os.ftruncate(descriptor, end)
        os.fsync(descriptor)
    return line, end


def _last_whole_line(content: mmap.mmap) -> tuple[bytes | None, int]:
    """The last line that was written whole, and where it ends."""
    end = content.rfind(b"\n") + 1
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        line = content[start:end]
        # JSON escapes NUL: a bare one is a block that never reached the disk before the power went.
        if b"\0" not in line:
            return line, end
        end = start
    return None, 0


def _check_object(line: bytes, path: Path) -> None:
    try:
        decode_object(line)
    except ValueError as error:
        raise EventLogError(
            f"the last line of {path} is not a JSON object ({error}); move the file aside, or write to another one"
        ) from error
