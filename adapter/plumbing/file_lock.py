"""One writer per file: an exclusive lock that the kernel keeps (``flock``).

The lock ends with the process, however that ends, so there is nothing to clean up after a kill. It also excludes a
second holder in the same process. Nothing here waits for a lock for more than a moment, and the file is opened like
every file of ours: no link is followed, and no other user's file is trusted.
"""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path

from .operating_system import require_linux

try:
    import fcntl
except ImportError:  # as on Windows
    require_linux(__name__)
    raise

from .safe_open import PRIVATE_FILE, open_own

__all__ = ["FileLock", "LockHeldError", "NoLocksError", "holding_process", "is_held", "open_locked"]

PAUSE_S = 0.05


class LockHeldError(OSError):
    """Another holder, of this process or another, has the lock.

    Attributes:
        pid: The process that holds it; None where the kernel does not say.
    """

    pid: int | None = None


class NoLocksError(OSError):
    """The file system has no locks; ``strerror`` is what it said."""


class FileLock:
    """A locked file, which is created when absent, for this user alone.

    In a forked child the file is closed, so that a data loader worker that outlives a killed run does not keep its
    lock. The file stays when the lock is released: removing it would let two processes lock two files of one name.

    Attributes:
        descriptor: The open file; -1 once the lock was released, and in a forked child.

    Args:
        path: The file.
        flags: As of ``os.open``.
        mode: Permissions of a new file.
        tries: How often to try, 50 ms apart: a process that only looks, or is being killed, holds it for a moment.

    Raises:
        LockHeldError: It is held already.
        NoLocksError: The file system has no locks.
        UnsafeFileError: A link, or another user's file, is in its place.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        flags: int = os.O_RDWR | os.O_CREAT,
        mode: int = PRIVATE_FILE,
        *,
        tries: int = 1,
    ) -> None:
        self.descriptor = open_locked(path, flags, mode, tries=tries)
        _held.add(self)

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    # Parent and child share the open file: closing leaves the lock to the parent, unlocking would take it away.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


def open_locked(
    path: str | os.PathLike[str], flags: int = os.O_RDWR | os.O_CREAT, mode: int = PRIVATE_FILE, *, tries: int = 1
) -> int:
    """A descriptor that holds the lock of a file for as long as it is open; raises as `FileLock` does.

    The caller closes it in a forked child.
    """
    while True:
        descriptor = open_own(path, flags, mode)
        try:
            _lock(descriptor, path, tries)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # moved aside between open and lock: take the file that is there now


def is_held(path: str | os.PathLike[str]) -> bool:
    """Whether a lock is held on a file that only we should have written.

    Creates nothing and keeps no lock; False also where the file cannot be opened or its file system has no locks.
    """
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def holding_process(path: str | os.PathLike[str]) -> int | None:
    """The process of this machine that holds a lock on a file; None where none does, or the kernel does not say."""
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _holder(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: str | os.PathLike[str], tries: int) -> None:
    for left in reversed(range(tries)):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not left:
                held = LockHeldError(error.errno, error.strerror, os.fspath(path))
                held.pid = _holder(descriptor)
                raise held from None
        except OSError as error:
            raise NoLocksError(error.errno, error.strerror, os.fspath(path)) from None
        time.sleep(PAUSE_S)
    return None


def _is_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> int | None:
    """The process that locked the file, where the kernel says."""
    status = os.fstat(descriptor)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        table = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    for line in table.splitlines():
        columns = line.split()
        if "FLOCK" in columns and wanted in columns:
            pid = int(columns[columns.index(wanted) - 1])
            return pid if pid > 0 else None
    return None
