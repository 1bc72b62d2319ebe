"""A file of JSON lines with one writer, whole lines only.

The lock is on the file itself, so there is no lock file to go stale. A line reaches the kernel in one ``write``:
a killed process leaves either all of it or nothing. What a full disk or a power cut tore is cut off, never continued.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Self

from ...adapter.contract.exceptions import EventLogError
from ...adapter.plumbing.durable import fsync_directory, write_all
from ...adapter.plumbing.file_lock import LockHeldError, NoLocksError, open_locked
from .reader import decode_object

__all__ = ["LineFile"]

_open_files: weakref.WeakSet[LineFile] = weakref.WeakSet()


class LineFile:
    """Appends whole lines to a file that this process alone may write.

    Not thread-safe but for `sync`: the caller serialises `append` and `close`. In a forked child the file is closed,
    so that a data loader worker that outlives its parent cannot keep the lock.

    Attributes:
        path: The file.
        last_line: The last whole line that was there when it was opened, or None.
        size: Bytes of the file.
        lines: Lines that were appended since it was opened.
        closed: Whether `append` would be refused; also true in a forked child.

    Args:
        path: The file; it and its directories are created when absent.
        tries: How often to try for the lock, 50 ms apart, where other writers hold it for a line only.

    Raises:
        EventLogError: The file is locked by another writer, cannot be opened, or holds something else than JSON lines.
    """

    def __init__(self, path: str | os.PathLike[str], *, tries: int = 1) -> None:
        self.path = Path(path)
        self._descriptor = _open_locked(self.path, tries)
        self.closed = False
        self._torn = False
        self.lines = 0
        try:
            self.last_line, self.size = _cut_torn_tail(self._descriptor, self.path)
            if not self.size:  # with lines in it, the process that began the file has made its name durable
                fsync_directory(self.path.parent)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, OSError):
                raise EventLogError(f"cannot open {self.path}: {error.strerror}") from error
            raise
        _open_files.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is closed, as in a forked child: the lock is that of one open file in one process."""
        return {**vars(self), "closed": True, "_descriptor": -1}

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
            write_all(self._descriptor, line)
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
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise EventLogError(f"cannot make {self.path} durable: {error.strerror}") from error

    def close(self) -> None:
        """Give up the file and its lock; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        _open_files.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut_off(self) -> None:
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError as error:
            raise EventLogError(f"cannot cut a torn line off {self.path}: {error.strerror}") from error
        self._torn = False


def _close_in_child() -> None:
    # The lock belongs to the open file, which parent and child share: closing leaves it to the parent, unlocking
    # would take it away from the parent.
    for file in list(_open_files):
        os.close(file._descriptor)
        file.closed, file._descriptor = True, -1
    _open_files.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _open_locked(path: Path, tries: int) -> int:
    """A descriptor for `path` that holds its lock."""
    try:
        _make_directories(path.parent)
        return open_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644, tries=tries)
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
