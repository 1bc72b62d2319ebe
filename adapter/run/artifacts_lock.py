"""One live run per artifacts directory.

The lock is a kernel lock on ``.lock``: it ends with the process, however that ends, so nothing has to be cleaned up
after a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from ..contract.exceptions import StartupContractError
from ..job.config import RunConfig
from ..plumbing.safe_open import open_own

__all__ = ["LOCK_NAME", "HeldLock", "lock_artifacts", "lock_directory", "lock_holder"]

LOCK_NAME = ".lock"
CODE = "startup.artifacts_in_use"
PATIENCE, PAUSE_S = 4, 0.05


class HeldLock:
    """An open, locked file; the lock lives as long as the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        _held.add(self)

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would let two processes lock two files of one name."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_held: weakref.WeakSet[HeldLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Close inherited descriptors, or a forked data worker that outlives a killed run would keep its lock."""
    for lock in _held:
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def lock_artifacts(config: RunConfig) -> Iterator[None]:
    """Hold the artifact directories of `config`, which must exist, for this process.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: another live process holds one of them, or its file system
            has no locks; ``startup.invalid_artifact_paths``: its lock cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        for directory in _separate_directories(config):
            stack.callback(lock_directory(directory, config.run_id).release)
        yield


def lock_holder(directory: Path) -> str | None:
    """Who holds an artifacts directory, in words; None when no process does. Neither makes nor keeps a lock."""
    try:
        descriptor = open_own(directory / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return None


def _separate_directories(config: RunConfig) -> list[Path]:
    """The artifacts directory, and those of the others that lie elsewhere."""
    root = config.artifacts_dir.resolve()
    others = {d.resolve() for d in (config.checkpoints_dir, config.samples_dir, config.metrics_dir)}
    return [root, *sorted(d for d in others if not d.is_relative_to(root))]


def lock_directory(directory: Path, run_id: str) -> HeldLock:
    """Hold a directory, which must exist, for this process, under the name `run_id`.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: another live process holds it, or its file system has no
            locks; ``startup.invalid_artifact_paths``: its lock cannot be opened.
    """
    path = directory / LOCK_NAME
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise StartupContractError(
            "startup.invalid_artifact_paths",
            f"{str(path)!r} cannot be opened: {error.strerror}. Let this user write it, or choose another folder with "
            "`TRAINER_ARTIFACTS_DIR`.",
        ) from error
    lock = HeldLock(descriptor)
    try:
        _lock_patiently(descriptor)
    except BlockingIOError:
        holder = _holder(descriptor)
        lock.release()
        raise StartupContractError(
            CODE,
            f"{str(directory)!r} is held by a live run ({holder}). "
            "Wait until it has ended, end it, or choose another artifacts directory.",
        ) from None
    except OSError as error:
        lock.release()
        raise StartupContractError(
            CODE,
            f"{str(directory)!r} cannot be locked, so that no other run can be kept out of it: {error.strerror}. "
            "Choose a folder on a file system with locks (Lustre: mounted with `flock`) by `TRAINER_ARTIFACTS_DIR`.",
        ) from error
    me = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(me).encode(), 0)
    return lock


def _lock_patiently(descriptor: int) -> None:
    """Lock the file; a process that only looks, or is being killed just now, holds it for a moment."""
    for _ in range(PATIENCE):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE_S)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, run {holder['run_id']!r}"
    except (ValueError, TypeError, KeyError):
        return "which has not written its name yet"
