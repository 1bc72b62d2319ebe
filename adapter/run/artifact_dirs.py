"""The directories of a run's artifacts: made, and proved writable and ours before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..contract.exceptions import StartupContractError
from ..job.config import RunConfig
from ..plumbing.durable import temporary_name
from ..plumbing.safe_open import distrust, make_directory

__all__ = ["artifact_dir_faults", "directory_fault", "prepare_artifact_dirs", "untrusted_dirs"]

CODE = "startup.invalid_artifact_paths"
WAY_OUT = "Choose another folder with `TRAINER_ARTIFACTS_DIR` or `--set artifacts_dir=...`."
SHARING = "If everyone who can write to it is trusted, as in a team's folder, set `TRAINER_SHARED_ARTIFACTS=1`."
HOLD_OUR_FILES_ALONE = ("checkpoints_dir", "samples_dir")
"""Directories whose files are taken for ours by their names, so that not even a new one may come from others."""


def prepare_artifact_dirs(config: RunConfig) -> None:
    """Make the directories of `config` and write a probe into each.

    Raises:
        StartupContractError: ``startup.invalid_artifact_paths`` with every directory that cannot be used, or that
            others may write.
    """
    faults = artifact_dir_faults(config, create=True)
    if faults:
        raise StartupContractError(CODE, "\n  ".join(faults))


def artifact_dir_faults(config: RunConfig, *, create: bool) -> list[str]:
    """The reasons why the artifact directories cannot be used, a sentence each.

    Args:
        config: The run.
        create: Make those that are missing; otherwise the nearest existing folder above them is probed.
    """
    # Who may change them is asked before anything is made in them, and again: a neighbour may have been quicker.
    return untrusted_dirs(config) or _unwritable_dirs(config, create=create) or untrusted_dirs(config)


def untrusted_dirs(config: RunConfig) -> list[str]:
    """Which of the artifact directories that exist another user could change, a sentence each."""

    def fault_of(name: str, path: Path) -> str | None:
        try:
            reason = distrust(path, may_be_sticky=name not in HOLD_OUR_FILES_ALONE) if path.is_dir() else None
        except OSError:  # which `directory_fault` names
            return None
        return reason and f"`{name}` {str(path)!r} is not safe to use: {reason}. {WAY_OUT} {SHARING}"

    return [] if config.shared_artifacts else _faults(config, fault_of)


def _faults(config: RunConfig, fault_of: Callable[[str, Path], str | None]) -> list[str]:
    """The faults of directories, by `fault_of`; what lies below a faulty one has its fault, and no line of its own."""
    names = ("artifacts_dir", "checkpoints_dir", "samples_dir", "metrics_dir")
    directories = {**{name: getattr(config, name) for name in names}, "events_path": config.events_path.parent}
    found: dict[Path, str] = {}
    for name, path in directories.items():
        if not any(path.is_relative_to(faulty) for faulty in found) and (fault := fault_of(name, path)):
            found[path] = fault
    return list(found.values())


def _unwritable_dirs(config: RunConfig, *, create: bool) -> list[str]:
    def fault_of(name: str, path: Path) -> str | None:
        return directory_fault(name, path, WAY_OUT, create=create, shared=config.shared_artifacts)

    faults = _faults(config, fault_of)
    if os.path.isdir(config.events_path):
        faults.append(f"`events_path` is {str(config.events_path)!r}, which is a directory. Name a file.")
    return faults


def directory_fault(name: str, path: Path, way_out: str, *, create: bool = True, shared: bool = True) -> str | None:
    """Why nothing can be written into the directory `path`, which is the setting `name`; None where it can."""
    try:
        if create:
            make_directory(path, shared=shared)
        _probe(path if create else _nearest_existing(path))
    except OSError as error:
        elsewhere = error.filename and not Path(error.filename).is_relative_to(path)
        blocked = f" by {error.filename!r}" if elsewhere else ""
        reason = (
            "it is not a directory" if isinstance(error, FileExistsError) and not blocked else error.strerror or error
        )
        reason = f"{reason}{blocked}"
        return f"`{name}` {str(path)!r} cannot be written: {reason}. {way_out}"
    return None


def _nearest_existing(path: Path) -> Path:
    while True:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        else:
            return path


def _probe(directory: Path) -> None:
    """Write and remove a file; permission bits alone say nothing about read-only mounts, quotas or a full disk."""
    probe = directory / temporary_name("probe")
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        probe.unlink()  # first, so that a kill leaves nothing
        os.write(descriptor, b"genlight")
    finally:
        os.close(descriptor)
