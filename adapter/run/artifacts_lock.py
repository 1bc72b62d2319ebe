"""One live run per artifacts directory, by a lock on its ``.lock``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..contract.exceptions import StartupContractError
from ..job.config import RunConfig
from ..plumbing.durable import write_bytes_durably
from ..plumbing.file_lock import FileLock, LockHeldError, NoLocksError, holding_process, is_held
from ..plumbing.safe_open import PRIVATE_FILE, read_own

__all__ = [
    "LOCK_NAME",
    "STOP_NAME",
    "last_holder",
    "lock_artifacts",
    "lock_directory",
    "lock_holder",
    "locking_process",
    "request_stop",
    "withdraw_stop",
]

LOCK_NAME = ".lock"
STOP_NAME = ".stop"
"""The file that asks the run that holds the directory to stop, from any host that shares it."""
CODE = "startup.artifacts_in_use"
TRIES = 5
LARGEST_NOTE_BYTES = 4096


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
    return _holder(directory) if is_held(directory / LOCK_NAME) else None


def locking_process(directory: Path) -> int | None:
    """The process of this machine that holds an artifacts directory; None where none is known to."""
    return holding_process(directory / LOCK_NAME)


def _separate_directories(config: RunConfig) -> list[Path]:
    """The artifacts directory, and those of the others that lie elsewhere."""
    root = config.artifacts_dir.resolve()
    others = {d.resolve() for d in (config.checkpoints_dir, config.samples_dir, config.metrics_dir)}
    return [root, *sorted(d for d in others if not d.is_relative_to(root))]


def lock_directory(directory: Path, run_id: str) -> FileLock:
    """Hold a directory, which must exist, for this process, under the name `run_id`.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: another live process holds it, or its file system has no
            locks; ``startup.invalid_artifact_paths``: its lock cannot be opened.
    """
    path = directory / LOCK_NAME
    try:
        lock = FileLock(path, tries=TRIES)
    except LockHeldError:
        raise StartupContractError(
            CODE,
            f"{str(directory)!r} is in use by a live run ({_holder(directory)}). "
            "Wait until it has ended, end it, or choose another artifacts directory.",
        ) from None
    except NoLocksError as error:
        raise StartupContractError(
            CODE,
            f"{str(directory)!r} cannot be locked, so other runs cannot be kept out of it: {error.strerror}. "
            "Choose a folder on a file system with locks (Lustre: mounted with `flock`) by `TRAINER_ARTIFACTS_DIR`.",
        ) from error
    except OSError as error:
        raise StartupContractError(
            "startup.invalid_artifact_paths",
            f"{str(path)!r} cannot be opened: {error.strerror}. Let this user write it, or choose another folder with "
            "`TRAINER_ARTIFACTS_DIR`.",
        ) from error
    me = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id}
    os.ftruncate(lock.descriptor, 0)
    os.pwrite(lock.descriptor, json.dumps(me).encode(), 0)
    return lock


def _holder(directory: Path) -> str:
    holder = last_holder(directory)
    try:
        return f"process {holder['pid']} on {holder['host']}, run {holder['run_id']!r}"
    except KeyError:
        return "which has not yet written its name"


def last_holder(directory: Path) -> dict[str, Any]:
    """Who took the lock of a directory last: ``pid``, ``host``, ``run_id``; empty where that is not known."""
    try:
        holder = json.loads(read_own(directory / LOCK_NAME, limit=LARGEST_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def request_stop(directory: Path) -> None:
    """Ask the run that holds a directory to stop, on whatever host it is.

    Raises:
        OSError: The directory cannot be written.
    """
    write_bytes_durably(directory / STOP_NAME, b"1\n", mode=PRIVATE_FILE)


def withdraw_stop(directory: Path) -> None:
    """Take such a request back, which was meant for an attempt that has ended."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (directory / STOP_NAME).unlink()
