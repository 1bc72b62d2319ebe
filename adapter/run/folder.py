"""Create a run's folder, prove that it is writable and safe, and lock it for one live run before training."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..contract.exceptions import StartupContractError
from ..job.config import RunConfig
from ..plumbing.durable import make_directory, remove_debris, temporary_name, write_bytes_durably
from ..plumbing.file_lock import FileLock, LockHeldError, NoLocksError, is_held
from ..plumbing.safe_open import PRIVATE_FILE, distrust, read_own

LOCK_NAME = ".lock"
STOP_NAME = ".stop"
"""The file that asks the run that holds the directory to stop, from any host that shares it."""
IN_USE, INVALID = "startup.artifacts_in_use", "startup.invalid_artifact_paths"
WAY_OUT = "Choose another folder with `TRAINER_ARTIFACTS_DIR` or `--set artifacts_dir=...`."
SHARING = "If everyone who can write to it is trusted, as in a team's folder, set `TRAINER_SHARED_ARTIFACTS=1`."
PRIVATE_FOLDERS = ("checkpoints_dir", "samples_dir")
"""Directories in which every file with the right name counts as ours, so nobody else may even add a file."""
TRIES = 5
LARGEST_NOTE_BYTES = 4096


# Directories


def prepare_artifact_dirs(config: RunConfig) -> None:
    """Make the directories of `config` and write a probe into each.

    Raises:
        StartupContractError: ``startup.invalid_artifact_paths``. The message lists every directory that is unusable or
            writable by others.
    """
    if faults := artifact_dir_faults(config, create=True):
        raise StartupContractError(INVALID, "\n  ".join(faults))


def artifact_dir_faults(config: RunConfig, *, create: bool) -> list[str]:
    """Return one sentence for each reason why an artifact directory cannot be used.

    Args:
        config: The run.
        create: Make missing directories; otherwise probe the nearest existing folder above them.
    """

    def unwritable(name: str, path: Path) -> str | None:
        return directory_fault(name, path, WAY_OUT, create=create, shared=config.shared_artifacts)

    # Check permissions before making anything, and again afterwards: another user may have made it first.
    faults = untrusted_dirs(config) or _faults(config, unwritable) or untrusted_dirs(config)
    if os.path.isdir(config.events_path):
        faults.append(f"`events_path` is {str(config.events_path)!r}, which is a directory. Name a file.")
    return faults


def untrusted_dirs(config: RunConfig) -> list[str]:
    """Return one sentence for each existing artifact directory that another user could change."""

    def fault_of(name: str, path: Path) -> str | None:
        try:
            reason = distrust(path, may_be_sticky=name not in PRIVATE_FOLDERS) if path.is_dir() else None
        except OSError:  # `directory_fault` reports it
            return None
        return reason and f"`{name}` {str(path)!r} is not safe to use: {reason}. {WAY_OUT} {SHARING}"

    return [] if config.shared_artifacts else _faults(config, fault_of)


def _faults(config: RunConfig, fault_of: Callable[[str, Path], str | None]) -> list[str]:
    """Return the faults of directories, by `fault_of`. A folder below a faulty one gets no separate line."""
    names = ("artifacts_dir", "checkpoints_dir", "samples_dir", "metrics_dir")
    directories = {**{name: getattr(config, name) for name in names}, "events_path": config.events_path.parent}
    faults: dict[Path, str] = {}
    for name, path in directories.items():
        if not any(path.is_relative_to(faulty) for faulty in faults) and (fault := fault_of(name, path)):
            faults[path] = fault
    return list(faults.values())


def directory_fault(
    name: str, path: Path, way_out: str, *, create: bool = True, shared: bool | None = None
) -> str | None:
    """Return why `path`, the value of the setting `name`, cannot be written; None if it can be written."""
    try:
        if create:
            make_directory(path, shared=shared)
        _probe(path if create else _nearest_existing(path))
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror or error
        return f"`{name}` {str(path)!r} cannot be written: {reason}. {way_out}"
    return None


def _nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, otherwise the nearest folder above it that does."""
    while True:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        else:
            return path


def _probe(directory: Path) -> None:
    """Write and remove a file: permission bits do not show read-only mounts, quotas or a full disk."""
    probe = directory / temporary_name("probe")
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        probe.unlink()  # first, so that a kill leaves nothing
        os.write(descriptor, b"genlight")
    finally:
        os.close(descriptor)


# Locks


@contextlib.contextmanager
def lock_artifacts(config: RunConfig) -> Iterator[None]:
    """Lock the existing artifact directories of `config` for this process. Raises the errors of `lock_directory`."""
    root = config.artifacts_dir.resolve()
    others = {d.resolve() for d in (config.checkpoints_dir, config.samples_dir, config.metrics_dir)}
    with contextlib.ExitStack() as stack:
        for directory in [root, *sorted(d for d in others if not d.is_relative_to(root))]:
            stack.callback(lock_directory(directory, config.run_id).release)
        for directory in {root, *others}:
            remove_debris(directory)
        yield


def lock_directory(directory: Path, run_id: str) -> FileLock:
    """Lock an existing directory for this process under the name `run_id`.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: another live process holds it, or its file system has no
            locks; ``startup.invalid_artifact_paths``: its lock cannot be opened.
    """
    path = directory / LOCK_NAME
    me = {"pid": os.getpid(), "host": socket.gethostname(), "run_id": run_id}
    try:
        lock = FileLock(path, tries=TRIES)
        try:
            os.ftruncate(lock.descriptor, 0)
            os.pwrite(lock.descriptor, json.dumps(me).encode(), 0)
        except BaseException:
            lock.release()
            raise
    except LockHeldError:
        raise StartupContractError(
            IN_USE,
            f"{str(directory)!r} is in use by a live run ({_holder(directory)}). "
            "Wait until it has ended, end it, or choose another artifacts directory.",
        ) from None
    except OSError as error:
        has_locks = not isinstance(error, NoLocksError)
        action = "opened" if has_locks else "locked, which needs a file system with locks"
        text = f"{str(path)!r} cannot be {action}: {error.strerror}. {WAY_OUT}"
        raise StartupContractError(INVALID if has_locks else IN_USE, text) from error
    return lock


def lock_holder(directory: Path) -> str | None:
    """Describe the process that holds an artifacts directory; None if none does. Neither creates nor keeps a lock."""
    return _holder(directory) if is_held(directory / LOCK_NAME) else None


def _holder(directory: Path) -> str:
    holder = last_holder(directory)
    try:
        return f"process {holder['pid']} on {holder['host']}, run {holder['run_id']!r}"
    except KeyError:
        return "which has not yet written its name"


def last_holder(directory: Path) -> dict[str, Any]:
    """Return ``pid``, ``host`` and ``run_id`` of the last process that locked a directory; empty if unknown."""
    try:
        holder = json.loads(read_own(directory / LOCK_NAME, limit=LARGEST_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


# Stop requests


def request_stop(directory: Path) -> None:
    """Ask the run that holds a directory to stop, on whatever host it runs.

    Raises:
        OSError: The directory cannot be written.
    """
    write_bytes_durably(directory / STOP_NAME, b"1\n", mode=PRIVATE_FILE)


def withdraw_stop(directory: Path) -> None:
    """Remove a stop request that was meant for an attempt that has ended."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (directory / STOP_NAME).unlink()
