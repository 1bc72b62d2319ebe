"""The files of checkpoints in a directory: records, intact or broken, and the data folders that they name.

These files in a directory belong to checkpoints:

- A file is a record if its content says so. With the suffix ``.ckpt``, a file of ``torch.save`` counts as well, because
  Lightning's own plugin wrote it.
- A folder is the data of a checkpoint if it holds a state file of this format and a record next to it names it. In it,
  only the files that the record lists belong to the checkpoint.

Everything else belongs to others, also inside a data folder, and so does every symbolic link. It is never replaced,
moved or removed.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...adapter.contract.exceptions import BrokenCheckpointError
from ...adapter.plumbing.safe_open import open_regular
from .format.record import (
    RECORD_MARKER,
    STATE_FILE,
    CheckpointRecord,
    is_record_of_callback,
    is_torch_file,
    name_of,
    read_record,
    record_path,
    record_paths,
)

STATE_MARKER = b'{"format":"genlight.training_state"'
"""Start of every state file, to distinguish a data folder from a user's own."""


_NUMBER = re.compile(r"(?<=.)~\d+(?=(\.[^.~]*)?\Z)", re.DOTALL)
"""Number of another data folder for the same checkpoint name, as in ``last~1`` or ``last~1.pth``."""


@dataclass(frozen=True)
class Listed:
    """A file that is a record or has the name of one: the parsed record, or the reason why it is broken."""

    path: Path
    record: CheckpointRecord | None
    problem: str = ""
    error: OSError | None = None
    """The error that left open whether the file is broken: this user may not read it, for example."""

    @property
    def is_own_but_broken(self) -> bool:
        """Whether it is a broken record with a name of the `Checkpoint` callback."""
        return self.record is None and is_record_of_callback(self.path) and is_checkpoint_file(self.path)


def records_in(directory: str | os.PathLike[str]) -> list[Listed]:
    """Return every record in `directory`, intact or broken, by name; a link is read as its target.

    A record of an older runtime may have any name.
    """
    return [listed for path in record_paths(directory) if (listed := _listed(path)) is not None]


def _listed(path: Path) -> Listed | None:
    """Return None if the file at `path` belongs to another program or is gone."""
    has_our_name = is_record_of_callback(path)
    try:
        # Another program's JSON may be large; do not parse it.
        if not has_our_name and path.suffix != ".ckpt" and not _begins_like_record(path):
            return None
        return Listed(path, read_record(path))
    except BrokenCheckpointError as error:
        return Listed(path, None, error.reason) if has_our_name or is_checkpoint_file(path) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        is_ours = has_our_name or path.suffix == ".ckpt"  # only the name is available
        return Listed(path, None, f"it cannot be read: {error.strerror}", error) if is_ours else None


def _begins_like_record(path: Path) -> bool:
    """Whether the file at `path` begins like a record, or is a truncated beginning of one."""
    with os.fdopen(open_regular(path), "rb") as file:
        beginning = file.read(len(RECORD_MARKER))
    return bool(beginning) and RECORD_MARKER.startswith(beginning)


def is_checkpoint_file(path: Path) -> bool:
    """Whether the file at `path` is the record of a checkpoint, intact or broken, or a ``.ckpt`` file of torch.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file():
        return False
    if is_torch_file(path):
        return path.suffix == ".ckpt"
    try:
        return _begins_like_record(path) or read_record(path).is_old
    except BrokenCheckpointError:
        return False


def is_record(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint of this format, intact or broken, is at `path`."""
    try:
        record = record_path(path)
        return record.is_file() and not is_torch_file(record) and is_checkpoint_file(record)
    except OSError:
        return False


def checkpoint_files(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the records in `directory`, intact or broken, and ``.ckpt`` files of torch, sorted; no links."""
    found = [listed for listed in records_in(directory) if not listed.path.is_symlink()]
    return [each.path for each in found if each.error is not None or is_checkpoint_file(each.path)]


def count_folder_names(listed: Sequence[Listed]) -> Counter[str]:
    """Count how many records of a directory name each folder in it.

    A link names nothing beyond its target's folder. For a broken record, every folder of its name may be the data.
    """
    own = [entry for entry in listed if not entry.path.is_symlink()]
    found = Counter(entry.record.folder or "" for entry in own if entry.record is not None)
    if broken := {name_of(entry.path) for entry in own if entry.record is None}:
        names = os.listdir(own[0].path.parent)
        found.update(name for name in names if not broken.isdisjoint((name, _NUMBER.sub("", name))))
    return found


def folders_of_checkpoints(files: Sequence[Path]) -> list[Path]:
    """Return the folders that the records `files` of one directory name, each once.

    For an older runtime's record, that is the folder of the same name, with its trainer's files.
    """
    listed = [entry for path in files if (entry := _listed(path)) is not None]
    data = [files[0].parent / name for name in sorted(count_folder_names(listed))]
    of_old = [entry.record.trainer_folder for entry in listed if entry.record is not None and entry.record.is_old]
    others = [folder for folder in of_old if folder is not None and not folder.is_symlink()]
    return [*filter(is_data_folder, data), *others]


def record_of_folder(folder: Path) -> Path | None:
    """Return the record that names the data folder `folder`; None if it is no data folder, or no record names it."""
    listed = records_in(folder.parent) if is_data_folder(folder) else []
    own = (entry for entry in listed if entry.record is not None and not entry.path.is_symlink())
    return next((entry.path for entry in own if entry.record and entry.record.folder == folder.name), None)


def is_data_folder(path: Path) -> bool:
    """Whether a folder, and not a link to one, holds the data of a checkpoint."""
    try:
        with os.fdopen(open_regular(path / STATE_FILE), "rb") as file:
            return file.read(len(STATE_MARKER)) == STATE_MARKER and not path.is_symlink()
    except OSError:
        return False


def files_in_the_way(directory: str | os.PathLike[str]) -> list[Path]:
    """Return files and folders that have a record name of the `Checkpoint` callback and are not checkpoints.

    A program killed while writing leaves one, empty or truncated. A save refuses to replace it.

    Raises:
        OSError: One cannot be read.
    """
    try:
        paths = [Path(directory, name) for name in sorted(os.listdir(directory))]
    except FileNotFoundError:
        return []
    return [path for path in paths if is_record_of_callback(path) and is_in_the_way(path)]


def is_in_the_way(record: Path) -> bool:
    """Whether something that is not a checkpoint is at `record`; a save may replace a symbolic link itself."""
    return os.path.lexists(record) and not record.is_symlink() and not is_checkpoint_file(record)
