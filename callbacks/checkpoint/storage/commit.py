"""Writing a checkpoint so that it is whole or absent, whenever the process or the machine dies.

1. All files are written into a temporary folder inside the destination directory, each followed by ``fsync``, and each
   is read back and compared with the digest that was taken from memory before the write.
2. The folder is marked, renamed to its name, and the directory synced. Without a record it means nothing yet.
3. The record is written under a temporary name, synced, compared, renamed, and the directory synced. This is the
   commit: a rename within a directory is atomic. The mark goes.

A file that is shared with earlier checkpoints is linked into the temporary folder in step 1 (see `frozen`).

Deleting goes the other way round: the folder is marked, and the record goes first. What a killed process leaves is
either temporary or a marked folder that no record names; `sweep` removes both, and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ....adapter.contract.exceptions import CheckpointError
from ....adapter.plumbing.durable import fsync_directory, temporary_name
from ..format.layout import (
    STATE_FILE,
    UNCOMMITTED_FILE,
    is_temporary,
    name_of,
    record_path,
)
from ..ownership import (
    Claims,
    DataFolder,
    claims_in,
    data_of,
    foreign_in,
    is_checkpoint_file,
    is_data_folder,
    is_debris,
    require_replaceable,
)
from .write_file import write_file

__all__ = [
    "SPACE_FOR_THE_REST",
    "Staging",
    "commit",
    "delete_checkpoint",
    "require_space",
    "stage",
    "sweep",
]

log = logging.getLogger(__name__)

SPACE_FOR_THE_REST = 1 << 20
"""Bytes beside tensors and JSON: headers, the record, folders."""


@dataclass(frozen=True)
class Staging:
    """The temporary folder of a checkpoint that is being made."""

    record: Path
    path: Path

    def folder(self, name: str) -> Path:
        """A folder within, made on first use."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def discard(self) -> None:
        """Remove the folder; does nothing once it was committed."""
        _remove_tree(self.path)
        _live.discard(self.path.name)


_live: set[str] = set()
"""Temporary names that this process is working on, which `sweep` leaves alone."""


def stage(path: str | os.PathLike[str]) -> Staging:
    """Make the temporary folder for the checkpoint at `path`.

    Raises:
        OSError: The directory cannot be made or written to.
    """
    record = record_path(path)
    record.parent.mkdir(parents=True, exist_ok=True)
    name = temporary_name(name_of(record))
    folder = record.parent / name
    _live.add(name)
    try:
        os.mkdir(folder)
    except OSError:
        _live.discard(name)
        raise
    return Staging(record, folder)


def commit(staging: Staging, folder: str, record: bytes) -> None:
    """Give the staged folder its name and write the record; durable when this returns.

    What the record before it named, if there was one, is removed then.

    Args:
        staging: What to commit.
        folder: A name from `choose_folder`.
        record: The content of the record, which names that folder.

    Raises:
        CheckpointError: Something that is not a checkpoint has the record's name.
        OSError: It could not be done. If the record was not yet renamed, nothing remains of the new checkpoint;
            if only the last sync failed, either the new checkpoint or the old one is there after a power cut.
    """
    require_replaceable(staging.record)
    directory = staging.record.parent
    target = directory / folder
    replaced = data_of(staging.record) if os.path.lexists(staging.record) else []
    _mark(staging.path)
    for path, _, _ in os.walk(staging.path, topdown=False):
        fsync_directory(path)
    if os.path.lexists(target):
        remove_data(DataFolder(target, None))  # What a killed process left.
    os.rename(staging.path, target)
    _live.discard(staging.path.name)
    try:
        fsync_directory(directory)
        for old in replaced:
            _mark(old.path)
        _write_record(staging.record, record)
    except BaseException:
        try_to_remove_data(DataFolder(target, None))
        raise
    fsync_directory(directory)
    _try_to_unmark(target)
    for old in replaced:
        try_to_remove_data(old)


def delete_checkpoint(path: str | os.PathLike[str], claims: Claims | None = None) -> None:
    """Remove a checkpoint, its record first; of a link to one, the link. One that is not there is no error.

    What is not of the checkpoint stays, also within its folder.

    Args:
        path: The checkpoint.
        claims: What the records of its directory claim; None reads them all.

    Raises:
        CheckpointError: Something that is not a checkpoint has that name.
        OSError: Something could not be removed.
    """
    record = record_path(path)
    if not os.path.lexists(record):
        return
    target = Path(os.path.realpath(record))
    if target.exists() and not is_checkpoint_file(target):
        raise CheckpointError(f"{record} is not a checkpoint, and is not removed")
    folders = data_of(record, claims)
    for folder in folders:
        _mark(folder.path)
    record.unlink(missing_ok=True)
    # Synced before the folder goes: otherwise a power cut could leave a record without its files.
    fsync_directory(record.parent)
    for folder in folders:
        remove_data(folder)


def remove_data(folder: DataFolder) -> None:
    """Remove a data folder of which no record says anything any more, but for what is not of its checkpoint.

    Raises:
        OSError: Something could not be removed.
    """
    foreign = set(foreign_in(folder))
    if not foreign:
        # Through a temporary name, so that a kill in between leaves nothing that looks whole.
        aside = folder.path.with_name(temporary_name(folder.path.name))
        os.rename(folder.path, aside)
        _remove_tree(aside)
        return
    log.warning(
        "%s stays, because it contains files that do not belong to the checkpoint: %s",
        folder.path,
        ", ".join(sorted(path.relative_to(folder.path).as_posix() for path in foreign)),
    )
    (folder.path / STATE_FILE).unlink(missing_ok=True)  # First: without it the folder is nobody's data.
    for path, _, files in os.walk(folder.path, topdown=False):
        for file in files:
            if Path(path, file) not in foreign:
                os.unlink(os.path.join(path, file))
        if not os.listdir(path):
            os.rmdir(path)


def try_to_remove_data(folder: DataFolder) -> None:
    """`remove_data`, where a failure must not hide what came before: it is logged, and the next sweep tries again."""
    try:
        remove_data(folder)
    except OSError as error:
        log.warning("Could not remove %s: %s", folder.path, error)


def sweep(directory: str | os.PathLike[str]) -> list[str]:
    """Remove what killed processes left in a checkpoint directory; only the run that holds the directory may.

    Returns:
        The names that were removed.
    """
    directory = Path(directory)
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    claims = claims_in(directory)
    swept = []
    for name in names:
        path = directory / name
        if is_temporary(name) and name not in _live and not path.is_symlink():
            _remove_temporary(path)
            swept.append(name)
        elif is_debris(path, claims):
            remove_data(DataFolder(path, None))
            swept.append(name)
        elif name in claims.folders and is_data_folder(path):
            _try_to_unmark(path)
    if swept:
        log.info("Removed what an interrupted run had left in %s: %s", directory, ", ".join(swept))
    return swept


def _mark(folder: Path) -> None:
    """Have a sweep know the folder should this process die while no record names it."""
    os.close(os.open(folder / UNCOMMITTED_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))


def _try_to_unmark(folder: Path) -> None:
    """A mark in a folder that a record names means nothing, so a failure is only logged."""
    try:
        (folder / UNCOMMITTED_FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("Could not remove the mark of %s: %s", folder, error)


def _write_record(path: Path, data: bytes) -> None:
    temporary = path.with_name(temporary_name(path.name))
    _live.add(temporary.name)
    try:
        write_file(temporary, [data])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        _live.discard(temporary.name)


def _remove_temporary(path: Path) -> None:
    if path.is_dir():
        _remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_tree(path: Path) -> None:
    """Remove a temporary folder. One that cannot be removed is left to the next sweep, with a warning."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("Could not remove %s: %s", path, error)


def require_space(directory: Path, needed: int) -> None:
    """Raise before a checkpoint of `needed` bytes that does not fit.

    Raises:
        CheckpointError: The file system has less free space.
    """
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs {needed / 1e6:,.1f} MB, but the file system of {directory} has {free / 1e6:,.1f} MB "
            "free; free some space, keep fewer checkpoints, or choose another directory"
        )
