"""One writer per file: an exclusive lock that the kernel keeps (``flock``).

The lock ends with the process, no matter how, so there is nothing to clean up after a kill. It also excludes a second
holder in the same process. Nothing here waits for a lock for more than a moment. The lock file is opened like all our
files: no link is followed, and no other user's file is trusted.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from pathlib import Path

from .imports import require_linux

try:
    import fcntl
except ImportError:  # on Windows
    require_linux(__name__)
    raise

from .safe_open import PRIVATE_FILE, open_own

PAUSE_S = 0.05


class LockHeldError(OSError):
    """Another holder, in this process or another, has the lock; `holding_process` may find which."""


class NoLocksError(OSError):
    """The file system has no locks; ``strerror`` is its answer."""


class FileLock:
    """A locked file, created if it is absent, with access only for this user.

    In a forked child, and in a copy, the file is closed, so that a data loader worker that outlives a killed run does
    not keep its lock. The file stays when the lock is released: removing it would let two processes lock two files of
    the same name.

    Attributes:
        descriptor: The open file; -1 after the release, in a forked child and in a copy.

    Args:
        path: The file.
        flags: Flags of ``os.open``.
        mode: Permissions of a new file.
        tries: How often to try, 50 ms apart: a process that only checks, or is being killed, holds it for a moment.

    Raises:
        LockHeldError: Somebody holds it already.
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
        self.descriptor = _open_locked(path, flags, mode, tries=tries)
        _held.add(self)

    def __getstate__(self) -> dict[str, int]:
        return {"descriptor": -1}

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    # Parent and child share the open file: closing leaves the lock to the parent, unlocking would take it away.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


def is_held(path: str | os.PathLike[str]) -> bool:
    """Whether a lock is held on a file that only we should have written.

    Creates nothing and keeps no lock; False also if the file cannot be opened or its file system has no locks.
    """
    try:
        os.close(_open_locked(path, os.O_RDONLY, 0o777, kind=fcntl.LOCK_SH))  # 0o777: narrow no permissions
    except LockHeldError:
        return True
    except OSError:
        pass
    return False


def holding_process(path: str | os.PathLike[str]) -> int | None:
    """Return the process of this machine that holds a lock on a file; None if there is none or the kernel hides it."""
    try:
        status, table = os.lstat(path), Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    line = re.search(rf"\bFLOCK .* ([1-9]\d*) {file} ", table)
    return None if line is None else int(line[1])


def _open_locked(
    path: str | os.PathLike[str], flags: int, mode: int, *, tries: int = 1, kind: int = fcntl.LOCK_EX
) -> int:
    """Open and lock the file that is at `path`; return its descriptor."""
    while True:
        descriptor = open_own(path, flags, mode)
        try:
            _lock(descriptor, path, tries, kind)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was moved aside between open and lock: take the one that is there now


def _lock(descriptor: int, path: str | os.PathLike[str], tries: int, kind: int) -> None:
    for remaining in reversed(range(tries)):
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not remaining:
                raise LockHeldError(error.errno, error.strerror, os.fspath(path)) from None
        except OSError as error:
            raise NoLocksError(error.errno, error.strerror, os.fspath(path)) from None
        time.sleep(PAUSE_S)
    return None


def _is_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
