"""Writing a checkpoint so that it is whole or absent, whenever the process or the machine dies; and removing it.

1. All files are written into a temporary folder inside the destination directory, each followed by ``fsync``, and each
   is read back and compared with the digest that was taken from memory before the write. A file that is shared with
   earlier checkpoints is linked.
2. The record is written there in the same way, under a temporary name, which marks the folder as one without a record.
   The folder is renamed to its name, and the directory synced.
3. The record is renamed out of the folder to its own name, and the directory synced. This is the commit: a rename
   within a file system is atomic.

Deleting goes the other way round: the folder gets such a mark, and the record goes first. What a killed process leaves
is either temporary or a marked folder that no record names; `sweep` removes both, and nothing else. What belongs to
checkpoints in a directory:

- A file is a record if it says so itself. Under the name ``.ckpt``, a file of ``torch.save`` counts as well, because
  Lightning's own plugin wrote it.
- A folder is the data of a checkpoint if it holds a state file of this format and a record beside it names it.
- A data folder that no record names is debris if a killed process left it: such a folder carries a mark. One with a
  name that the `Checkpoint` callback gives needs none.

Whatever else lies there belongs to others, also inside a data folder. So is every symbolic link. Nothing of it is ever
replaced, moved or removed.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ....adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ....adapter.plumbing.durable import fsync_directory, temporary_name
from ....adapter.plumbing.safe_open import open_regular
from ..format.record import (
    FROZEN_FILE,
    MODEL_FILE,
    RECORD_MARKER,
    SCORES_FILE,
    STATE_FILE,
    TENSORS_FILE,
    TRAINER_FOLDER,
    CheckpointRecord,
    folder_names,
    is_name_of_callback,
    is_record_of_callback,
    is_temporary,
    is_torch_file,
    moved_record,
    name_of,
    name_of_folder,
    read_record,
    record_path,
    record_paths,
    step_name,
)
from ..format.tensor_files import SLICES_FILE, rank_of
from .files import verify_files, write_file

__all__ = [
    "SPACE_FOR_THE_REST",
    "STATE_MARKER",
    "Listed",
    "Staging",
    "checkpoint_files",
    "choose_folder",
    "claims_in",
    "claims_of",
    "commit",
    "delete_checkpoint",
    "folders_of_checkpoints",
    "is_checkpoint_file",
    "move_older_final",
    "records_in",
    "require_replaceable",
    "require_space",
    "stage",
    "sweep",
]

log = logging.getLogger(__name__)

STATE_MARKER = b'{"format":"genlight.training_state"'
"""How every state file begins, so that a data folder can be told from a user's own."""

_OWN_NAMES = frozenset({MODEL_FILE, FROZEN_FILE, TENSORS_FILE, STATE_FILE, SLICES_FILE, TRAINER_FOLDER})


@dataclass(frozen=True)
class DataFolder:
    """The data folder of a checkpoint."""

    path: Path
    files: frozenset[str] | None
    """The files that its record lists, relative to `path`; None where no record can be read."""


@dataclass(frozen=True)
class Claims:
    """Which folders of a directory its records name."""

    folders: Counter[str]
    """How many records name each."""
    unreadable: frozenset[str]
    """Names of the records that cannot be read: any folder of such a name may be theirs."""

    def __contains__(self, folder: str) -> bool:
        return folder in self.folders or not self.unreadable.isdisjoint((folder, name_of_folder(folder)))


@dataclass(frozen=True)
class Listed:
    """A file that has the name of a record: the parsed record, or why it is broken."""

    path: Path
    record: CheckpointRecord | None
    problem: str = ""
    error: OSError | None = None
    """Why it cannot be told whether it is broken: this user may not read it, for example."""


def records_in(directory: str | os.PathLike[str]) -> list[Listed]:
    """Every record in `directory`, whole or broken, by name; links are read as what they point to."""
    found = []
    for path in record_paths(directory):
        try:
            found.append(Listed(path, read_record(path)))
        except BrokenCheckpointError as error:
            if is_record_of_callback(path) or is_checkpoint_file(path):  # and not another program's file
                found.append(Listed(path, None, error.reason))
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append(Listed(path, None, f"it cannot be read: {error.strerror}", error))
    return found


def claims_of(listed: Sequence[Listed]) -> Claims:
    """The files that the records of a directory claim; a link claims nothing beyond what its target does."""
    own = [entry for entry in listed if not entry.path.is_symlink()]
    folders = Counter(entry.record.folder or "" for entry in own if entry.record is not None)
    return Claims(folders, frozenset(name_of(entry.path) for entry in own if entry.record is None))


def claims_in(directory: Path) -> Claims:
    """As `claims_of` the records in `directory`."""
    return claims_of(records_in(directory))


def is_checkpoint_file(path: Path) -> bool:
    """Whether the file at `path` is the record of a checkpoint, whole or broken, or a ``.ckpt`` file of torch.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file():
        return False
    if is_torch_file(path):
        return path.suffix == ".ckpt"
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(len(RECORD_MARKER))
    if start and (start.startswith(RECORD_MARKER) or RECORD_MARKER.startswith(start)):
        return True  # or what is left of one that was cut off
    try:
        read_record(path)
    except BrokenCheckpointError:
        return False
    return True


def require_replaceable(record: Path) -> None:
    """Raise where a record would replace a file that is not a checkpoint; a symbolic link is replaced itself.

    Raises:
        CheckpointError: There is such a file.
    """
    if record.is_file() and not record.is_symlink() and not is_checkpoint_file(record):
        raise CheckpointError(
            f"{record} is not a checkpoint, and is not overwritten; move it away, or choose another place"
        )


def is_data_folder(path: Path) -> bool:
    """Whether a folder, and not a link to one, holds the data of a checkpoint."""
    try:
        with os.fdopen(open_regular(path / STATE_FILE), "rb") as file:
            return file.read(len(STATE_MARKER)) == STATE_MARKER and not path.is_symlink()
    except OSError:
        return False


def is_debris(path: Path, claims: Claims) -> bool:
    """Whether a killed process left the data folder `path`, so that it may be removed."""
    if path.name in claims or not is_data_folder(path):
        return False
    return is_name_of_callback(name_of_folder(path.name)) or any(is_temporary(name) for name in os.listdir(path))


def data_of(record: Path, claims: Claims | None = None) -> DataFolder | None:
    """The data folder of the checkpoint at `record`, unless another record names it too.

    None of a link, whose target is another checkpoint, and of a broken record, which does not say what it named: where
    the `Checkpoint` callback gave its name, a sweep finds the folder once the record is gone.

    Args:
        record: The record.
        claims: What the records beside it claim; None reads them all.

    Raises:
        OSError: The record cannot be read.
    """
    if record.is_symlink():
        return None
    try:
        parsed = read_record(record)
    except (FileNotFoundError, BrokenCheckpointError):
        return None
    path = parsed.data_path
    if path is None or not is_data_folder(path) or (claims or claims_in(record.parent)).folders[path.name] > 1:
        return None
    return DataFolder(path, frozenset(parsed.file_name(file) for file in parsed.files))


def checkpoint_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The records in `directory`, whole or broken, and ``.ckpt`` files of torch, sorted; no links.

    A file that this user may not read counts where it has a name that the `Checkpoint` callback gives.
    """
    return [path for path in record_paths(directory) if not path.is_symlink() and _may_be_checkpoint(path)]


def _may_be_checkpoint(path: Path) -> bool:
    try:
        return is_checkpoint_file(path)
    except PermissionError:
        return is_record_of_callback(path)


def folders_of_checkpoints(files: Sequence[Path]) -> list[Path]:
    """The folders that the records `files` of one directory name, each once.

    Of an older runtime's record that is the folder of its name, with what its trainer wrote.

    Raises:
        OSError: A record cannot be read.
    """
    found: dict[Path, None] = {}
    claims: Claims | None = None
    for path in files:
        try:
            record = read_record(path)
        except BrokenCheckpointError:  # whose are all that it may have had
            claims, name = claims or claims_in(path.parent), name_of(path)
            names = [entry for entry in sorted(os.listdir(path.parent)) if name in (entry, name_of_folder(entry))]
            own = [path.parent / entry for entry in names if entry not in claims.folders]
            found.update(dict.fromkeys(folder for folder in own if is_data_folder(folder)))
            continue
        folder = path.parent / (record.name if record.is_old else record.folder or "")
        if is_data_folder(folder) or (record.is_old and folder.is_dir() and not folder.is_symlink()):
            found[folder] = None
    return list(found)


def choose_folder(record: Path) -> str:
    """The name for the data folder of a new checkpoint: the first that is free."""
    return next(name for name in folder_names(name_of(record)) if not os.path.lexists(record.parent / name))


def foreign_in(folder: DataFolder) -> list[Path]:
    """Files and links in a data folder that are not of its checkpoint."""
    found = []
    for path, folders, files in os.walk(folder.path):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        found += [
            Path(path, name)
            for name in (*files, *links)
            if not _is_own(Path(path, name).relative_to(folder.path).as_posix(), folder.files)
        ]
    return found


def _is_own(name: str, listed: Collection[str] | None) -> bool:
    if name == SCORES_FILE or is_temporary(name):
        return True
    if listed is not None:
        return name in listed
    return PurePosixPath(name).parts[0] in _OWN_NAMES or rank_of(name) is not None


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
    replaced = data_of(staging.record)
    named = temporary_name(staging.record.name)
    write_file(staging.path / named, [record])
    for path, _, _ in os.walk(staging.path, topdown=False):
        fsync_directory(path)
    os.rename(staging.path, target)
    _live.discard(staging.path.name)
    try:
        fsync_directory(directory)
        if replaced is not None:
            _mark(replaced.path)
        os.replace(target / named, staging.record)
    except BaseException:
        try_to_remove_data(DataFolder(target, None))
        raise
    fsync_directory(directory)
    if replaced is not None:
        try_to_remove_data(replaced)


def move_older_final(final: Path, *, step: int, run_id: str) -> None:
    """Give the name of its step to the final checkpoint at `final`, if the run has gone on from it to `step`.

    It is whole under one of its names at every moment: its files get second names first, and a record of its step.
    Where a whole checkpoint of that step is there already, that one stays in its place. What cannot be moved, as on a
    file system without links, is left to be replaced, with a warning: the new end of the run is worth more.

    Args:
        final: The record that the new final checkpoint will have.
        step: Completed steps of the new one.
        run_id: Of the run that saves it; what another run left is replaced.
    """
    try:
        old = read_record(final)
    except (BrokenCheckpointError, OSError):
        return
    is_earlier_end = old.final and not old.is_old and old.run_id == run_id and old.step < step
    if final.is_symlink() or not is_earlier_end or old.data_path is None:
        return
    target = final.with_name(f"{step_name(old.step)}.json")
    try:
        if not _is_whole(target):
            _save_as(old, target)
        delete_checkpoint(final)
    except (CheckpointError, OSError) as error:
        log.warning("%s is replaced, since it could not become %s: %s", final, target, error)


def _is_whole(path: Path) -> bool:
    try:
        verify_files(read_record(path))
    except (BrokenCheckpointError, OSError):
        return False
    return True


def _save_as(old: CheckpointRecord, target: Path) -> None:
    """Commit the files of `old` once more, as the checkpoint of its step at `target`."""
    assert old.data_path is not None
    staging = stage(target)
    try:
        for name in [
            *map(old.file_name, old.files),
            *([SCORES_FILE] if (old.data_path / SCORES_FILE).is_file() else []),
        ]:
            copy = staging.path / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            os.link(old.data_path / name, copy, follow_symlinks=False)
        folder = choose_folder(target)
        commit(staging, folder, moved_record(old.path.read_bytes(), folder))
    except BaseException:
        staging.discard()
        raise


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
    folder = data_of(record, claims)
    if folder is not None:
        _mark(folder.path)
    record.unlink(missing_ok=True)
    # Synced before the folder goes: otherwise a power cut could leave a record without its files.
    fsync_directory(record.parent)
    if folder is not None:
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


def sweep(directory: str | os.PathLike[str], claims: Claims | None = None) -> list[str]:
    """Remove what killed processes left in a checkpoint directory; only the run that holds the directory may.

    Args:
        directory: The directory.
        claims: What its records claim; None reads them all.

    Returns:
        The names that were removed.
    """
    directory = Path(directory)
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    claims = claims or claims_in(directory)
    swept = []
    for name in names:
        path = directory / name
        if is_temporary(name) and name not in _live and not path.is_symlink():
            _remove_temporary(path)
            swept.append(name)
        elif is_debris(path, claims):
            remove_data(DataFolder(path, None))
            swept.append(name)
    if swept:
        log.info("Removed what an interrupted run had left in %s: %s", directory, ", ".join(swept))
    return swept


def _mark(folder: Path) -> None:
    """Have a sweep know the folder should this process die while no record names it."""
    os.close(os.open(folder / temporary_name("record"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


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
