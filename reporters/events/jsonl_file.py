"""A file of JSON lines with one writer, whole lines only, and a bound on what a power cut can take.

The lock is on the file itself, so there is no lock file to go stale. A line reaches the kernel in one ``write``:
a killed process leaves either all of it or nothing. What a full disk or a power cut tore is cut off, never continued.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...adapter.contract.exceptions import EventLogError, ThreadLimitError
from ...adapter.plumbing.durable import fsync_directory, write_all
from ...adapter.plumbing.file_lock import LockHeldError, NoLocksError, open_locked
from ...adapter.plumbing.threads import started
from .reader import decode_object

__all__ = ["LineFile"]

SYNC_EVERY_S = 1.0
"""How long a power cut may take lines that no caller waited for: a sync costs 0.2 ms of CPU, and a shared disk more."""

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
        is_roused: Whether the flushing thread is on its way.

    Args:
        path: The file; it and its directories are created when absent.
        flush_every_s: Seconds from a line, or a `rouse`, until `before_flush` is called. None has no thread for that:
            lines are durable after `sync` alone.
        sync_every_s: Lines become durable on their own after at most about this many seconds more.
        before_flush: Called in the flushing thread; may append, and `rouse` again.
        tries: How often to try for the lock, 50 ms apart, where other writers hold it for a line only.

    Raises:
        EventLogError: The file is locked by another writer, cannot be opened, or holds something else than JSON lines.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        flush_every_s: float | None,
        sync_every_s: float = SYNC_EVERY_S,
        before_flush: Callable[[], None] = lambda: None,
        tries: int = 1,
    ) -> None:
        self.path = Path(path)
        self._flush_every_s = flush_every_s
        self._sync_every_s = sync_every_s
        self._sync_at: float | None = None
        """When the flusher makes lines durable, on the clock of ``time.monotonic``; None where they are."""
        self._before_flush = before_flush
        self._descriptor = _open_locked(self.path, tries)
        self.closed = False
        self._torn = False
        self.is_roused = False
        # Not an Event: an interrupt inside of its `set` can leave its lock held for ever.
        self._closing: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Tells the flusher that there is something to do (False), and about the end (True)."""
        self.lines = 0
        self._flush_error: EventLogError | None = None
        self._flusher: threading.Thread | None = None
        try:
            self.last_line, self.size = _cut_torn_tail(self._descriptor, self.path)
            if not self.size:  # with lines in it, the process that began the file has made its name durable
                fsync_directory(self.path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise
        _open_files.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is closed, as in a forked child: the lock is that of one open file in one process."""
        state = {name: value for name, value in vars(self).items() if name != "_closing"}
        return {**state, "closed": True, "_descriptor": -1, "_flusher": None, "is_roused": False, "_sync_at": None}

    def append(self, *lines: bytes) -> None:
        """Write lines, which end with their newline, one after the other and each whole or not at all.

        Raises:
            EventLogError: The file is closed, or a line could not be written; the file then ends with the one before.
        """
        if self.closed or self._torn or self._flush_error is not None:
            self._recover()
        descriptor, start, count = self._descriptor, self.size, self.lines
        end = start
        try:
            for line in lines:
                end = start + len(line)
                written = os.write(descriptor, line)
                if written != len(line):
                    write_all(descriptor, line[written:])
                start, count = end, count + 1
            self.size, self.lines = start, count
        except BaseException as error:
            # Also for a KeyboardInterrupt that lands between a write and its bookkeeping.
            self._settle(start, end, count)
            if isinstance(error, OSError):
                raise EventLogError(f"cannot write to {self.path}: {error.strerror}") from error
            raise
        if not self.is_roused:
            self.rouse()

    def rouse(self) -> bool:
        """Have the flusher come by in about `flush_every_s`, unless it is on its way; False where there is none.

        The system may have no room for its thread.
        """
        if not self.is_roused and self._flush_every_s is not None:
            if self._flusher is None:
                try:
                    self._flusher = self._start_flusher()
                except ThreadLimitError:
                    self._flush_every_s = None
                    return False
            self.is_roused = True
            self._closing.put(False)
        return self._flush_every_s is not None

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
        """Make everything durable and give up the lock; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._closing.put(True)
        try:
            if self._flusher is not None:
                self._flusher.join()
            if self.is_roused or self._sync_at is not None:
                self.sync()
        finally:
            _open_files.discard(self)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self) -> None:
        """Mend what an earlier call left behind, or say why that cannot be."""
        if self.closed:
            raise EventLogError(f"{self.path} is closed in process {os.getpid()}")
        if self._flush_error is not None:
            error, self._flush_error, self._flusher = self._flush_error, None, None
            self.is_roused, self._sync_at = False, None  # the flusher has ended, whatever it was still to do
            raise error
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError as error:
            raise EventLogError(f"cannot cut a torn line off {self.path}: {error.strerror}") from error
        self._torn = False

    def _settle(self, start: int, end: int, count: int) -> None:
        """Bring the bookkeeping and the file to agree: the line from `start` to `end` is in it, or no byte of it is."""
        if start < end and end == os.fstat(self._descriptor).st_size:
            self.size, self.lines = end, count + 1
            return
        self.size, self.lines = start, count
        try:
            os.ftruncate(self._descriptor, start)
        except OSError:
            self._torn = True  # the next append cuts it off, or reports that it cannot

    def _start_flusher(self) -> threading.Thread:
        return started(threading.Thread(target=self._flush, name=f"flush {self.path.name}", daemon=True))

    def _flush(self) -> None:
        """Flush and make lines durable in the background; sleeps while there is nothing to do."""
        flush_at: float | None = None
        while True:
            next_at = min((at for at in (flush_at, self._sync_at) if at is not None), default=None)
            try:
                if self._closing.get(timeout=None if next_at is None else max(0.0, next_at - time.monotonic())):
                    return
                # Told twice, it does not wait any longer.
                wait_s = self._flush_every_s if flush_at is None else 0.0
                flush_at = time.monotonic() + (wait_s or 0.0)
            except queue.Empty:
                pass
            now = time.monotonic()
            try:
                if flush_at is not None and now >= flush_at:
                    # In this order a line that is appended meanwhile is flushed here, or wakes us again.
                    flush_at, self.is_roused = None, False
                    self._before_flush()
                    self._sync_at = self._sync_at or now + self._sync_every_s
                if self._sync_at is not None and now >= self._sync_at:
                    self._sync_at = None
                    self.sync()
            except EventLogError as error:
                self._flush_error = error
                return


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
