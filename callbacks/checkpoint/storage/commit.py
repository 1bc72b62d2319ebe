"""Writing a checkpoint so that it is whole or absent, whenever the process or the machine dies.

1. All files are written into a temporary folder inside the destination directory, each followed by ``fsync``, and each
   is read back and compared with the digest that was taken from memory before the write.
2. The folder is renamed to its name, and the directory synced. Without a record it means nothing yet.
3. The record is written under a temporary name, synced, compared, renamed, and the directory synced. This is the
   commit: a rename within a directory is atomic.

Deleting goes the other way round: the record first. What a killed process leaves is either temporary or a folder that
no record names; `sweep` removes both.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ....adapter.plumbing.durable import fsync_directory, temporary_name
from ..format.layout import STATE_FILE, alternative_folder, is_temporary, name_of, record_path, record_paths
from ..format.record import read_record
from .write_file import write_file

__all__ = [
    "STATE_MARKER",
    "Staging",
    "commit",
    "delete_checkpoint",
    "folder_for",
    "move_aside",
    "require_space",
    "stage",
    "sweep",
    "try_to_move_aside",
]

log = logging.getLogger(__name__)

STATE_MARKER = b'{"format":"genlight.training_state"'
"""How every state file begins, so that a folder without a record can be told from a user's own."""


@dataclass
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

    Raises:
        OSError: It could not be done. If the record was not yet renamed, nothing remains of the new checkpoint;
            if only the last sync failed, either the new checkpoint or the old one is there after a power cut.
    """
    directory = staging.record.parent
    target = directory / folder
    for path, _, _ in os.walk(staging.path, topdown=False):
        fsync_directory(path)
    move_aside(target)  # A folder of this name without a record is what a killed process left.
    os.rename(staging.path, target)
    _live.discard(staging.path.name)
    try:
        fsync_directory(directory)
        _write_record(staging.record, record)
    except BaseException:
        try_to_move_aside(target)
        raise
    fsync_directory(directory)


def folder_for(record: Path) -> tuple[str, str | None]:
    """The folder name for a new checkpoint, and that of the checkpoint it replaces, if any."""
    name = name_of(record)
    try:
        replaced = read_record(record).folder
    except FileNotFoundError:
        return name, None
    except BrokenCheckpointError:
        # Whatever it named is not usable; `name` may still be what it means, so leave that alone until committed.
        return alternative_folder(name, name), name
    return alternative_folder(name, replaced), replaced


def delete_checkpoint(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, its record first; a checkpoint that is not there is no error.

    Raises:
        OSError: Something could not be removed.
    """
    record = record_path(path)
    folder: str | None = None
    if not record.is_symlink():
        try:
            folder = read_record(record).folder
        except FileNotFoundError:
            return
        except BrokenCheckpointError:
            folder = name_of(record)
    record.unlink(missing_ok=True)
    # Synced before the folder goes: otherwise a power cut could leave a record without its files.
    fsync_directory(record.parent)
    if folder is not None and _is_data_folder(record.parent / folder):
        move_aside(record.parent / folder)


def move_aside(path: Path) -> None:
    """Remove a folder through a temporary name, so that a kill in between leaves nothing that looks whole."""
    if not path.is_dir():
        return
    aside = path.with_name(temporary_name(path.name))
    os.rename(path, aside)
    _remove_tree(aside)


def try_to_move_aside(path: Path) -> None:
    """`move_aside`, where a failure must not hide what came before: it is logged, and the next sweep tries again."""
    try:
        move_aside(path)
    except OSError as error:
        log.warning("Could not remove %s: %s", path, error)


def sweep(directory: str | os.PathLike[str]) -> list[str]:
    """Remove what killed processes left in a checkpoint directory; only the run that holds the directory may.

    Returns:
        The names that were removed.
    """
    directory = Path(directory)
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    debris = [entry.name for entry in entries if is_temporary(entry.name) and entry.name not in _live]
    folders = [entry.name for entry in entries if entry.is_dir() and not is_temporary(entry.name)]
    of_checkpoints = [name for name in folders if _is_data_folder(directory / name)]
    if of_checkpoints:
        named = set(_named_folders(directory))
        debris += [name for name in of_checkpoints if name not in named]
    for name in debris:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            move_aside(path)
        else:
            path.unlink(missing_ok=True)
    if debris:
        log.info("Removed what an interrupted run left in %s: %s", directory, ", ".join(debris))
    return debris


def _is_data_folder(path: Path) -> bool:
    """Whether `path` is the data folder of a checkpoint, and not something that a user put there."""
    try:
        with open(path / STATE_FILE, "rb") as file:
            return file.read(len(STATE_MARKER)) == STATE_MARKER
    except OSError:
        return False


def _named_folders(directory: Path) -> Iterator[str]:
    """Folders that belong to a record; both possible ones where the record is broken."""
    for record in record_paths(directory):
        try:
            yield read_record(record).folder or ""
        except FileNotFoundError:
            continue
        except BrokenCheckpointError:
            yield from (name_of(record), alternative_folder(name_of(record), name_of(record)))


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
