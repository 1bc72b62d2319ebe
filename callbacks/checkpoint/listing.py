"""The files of checkpoints in a directory: records, intact or broken, and the data folders that they name.

These files in a directory belong to checkpoints:

- A file is a record if its content says so. With the suffix ``.ckpt``, a file of ``torch.save`` counts as well, because
  Lightning's own plugin wrote it.
- A folder is the data of a checkpoint if it holds a state file of this format, and a record next to the folder names
  it. Of the files in the folder, only those that the record lists belong to the checkpoint.

Everything else belongs to others, also inside a data folder, and so does every symbolic link. It is never replaced,
moved or removed.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ...adapter.contract.exceptions import BrokenCheckpointError
from ...adapter.plumbing.safe_open import read_beginning, read_own
from .format.record import (
    FINAL_NAME,
    RECORD_MARKER,
    RECORD_SUFFIXES,
    SCORES_FILE,
    STATE_FILE,
    CheckpointRecord,
    is_record_of_callback,
    is_torch_file,
    name_of,
    read_record,
    record_path,
    record_paths,
    step_of_name,
)

log = logging.getLogger(__name__)

STATE_MARKER = b'{"format":"genlight.training_state"'
"""Start of every state file, to distinguish a data folder from a user's own."""


_NUMBER = re.compile(r"(?<=.)~\d+(?=(\.[^.~]*)?\Z)", re.DOTALL)
"""Number of another data folder for the same checkpoint name, as in ``last~1`` or ``last~1.pth``."""


@dataclass(frozen=True)
class Listed:
    """A file that is a record or has the name of one. It is read when it is needed, and once."""

    path: Path
    _seen: dict[Path, object] = field(default_factory=dict, compare=False, repr=False)
    """The `_identity` of each file that was read, taken just before the read."""

    @functools.cached_property
    def _content(self) -> tuple[CheckpointRecord | None, str, OSError | None]:
        """Return the record or None, the reason why it is broken, and the error of the read."""
        self._seen[self.path] = _identity(self.path)
        try:
            record = read_record(self.path)
        except BrokenCheckpointError as error:
            return None, error.reason, None
        except FileNotFoundError:
            return None, "it was removed meanwhile", None
        except OSError as error:
            return None, f"it cannot be read: {error.strerror}", error
        if record.data_path is not None:
            self._seen[record.data_path / SCORES_FILE] = _identity(record.data_path / SCORES_FILE)
        return replace(record, metrics={**record.metrics, **read_scores(record)}), "", None

    @property
    def is_current(self) -> bool:
        """Whether the files of the record are still those that were read; true before it is read."""
        return all(_identity(path) == identity for path, identity in self._seen.items())

    @property
    def record(self) -> CheckpointRecord | None:
        """The parsed record, with the scores that came later; None if it is broken. The files are not proven."""
        return self._content[0]

    @property
    def problem(self) -> str:
        """The reason why the record is broken; empty if it is not."""
        return self._content[1]

    @property
    def error(self) -> OSError | None:
        """The error that hides whether the record is broken; for example, this user may not read it."""
        return self._content[2]

    @property
    def is_own_but_broken(self) -> bool:
        """Whether it is a broken record with a name of the `Checkpoint` callback."""
        return is_record_of_callback(self.path) and self.record is None and is_checkpoint_file(self.path)

    @property
    def age(self) -> tuple[int, int, int]:
        """Key that sorts checkpoints by step, the final one last, then by time of commit.

        If the `Checkpoint` callback gave the name, the step comes from there. An unreadable ``final`` counts as newest.
        """
        name = name_of(self.path)
        step = step_of_name(name) if is_record_of_callback(self.path) else None
        if step is None and self.record is not None:
            return (self.record.step, int(self.record.final), self.record.created_at_ms)
        return (sys.maxsize if name == FINAL_NAME else step or step_of_name(name) or 0, 0, 0)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def list_checkpoints(directory: str | os.PathLike[str], earlier: Sequence[Listed] = ()) -> list[Listed]:
    """Return every record in `directory`, intact or broken, oldest step first; a link is read as its target.

    A record of an older runtime may have any name, so files with other names than the `Checkpoint` callback gives are
    read by this call.

    Args:
        directory: The folder of the records.
        earlier: Result of an earlier call; records that have not changed since are not read again.
    """
    known = {listed.path: listed for listed in earlier if listed.is_current}
    found = (known.get(path) or Listed(path) for path in record_paths(directory))
    return sorted(filter(_is_ours, found), key=lambda listed: listed.age)


def _is_ours(listed: Listed) -> bool:
    """Whether a file may be a checkpoint; if not, it belongs to another program or is gone."""
    if is_record_of_callback(listed.path):
        return True
    is_named = listed.path.suffix == ".ckpt"
    try:
        # Another program's JSON may be large; do not parse it.
        if not is_named and not _begins_like_record(listed.path):
            return False
        return listed.record is not None or (is_named if listed.error else is_checkpoint_file(listed.path))
    except OSError:
        return is_named


LARGEST_BYTES = 1 << 20
"""Limit on the size of a file of scores."""


def read_scores(record: CheckpointRecord) -> dict[str, float]:
    """Return the scores for `record` that came after it was written."""
    if record.data_path is None:
        return {}
    path = record.data_path / SCORES_FILE
    try:
        return msgspec.json.decode(read_own(path, limit=LARGEST_BYTES), type=dict[str, float])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be read: %s", path, getattr(error, "strerror", None) or error)
        return {}


def _begins_like_record(path: Path) -> bool:
    """Whether the file at `path` begins like a record, or is a truncated beginning of one."""
    beginning = read_beginning(path, len(RECORD_MARKER))
    return bool(beginning) and RECORD_MARKER.startswith(beginning)


def is_checkpoint_file(path: Path) -> bool:
    """Whether the file at `path` is the record of a checkpoint, intact or broken, or a ``.ckpt`` file of torch.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file():
        return False
    if _begins_like_record(path):
        return True
    if is_torch_file(path):
        return path.suffix == ".ckpt"
    try:
        return read_record(path).is_old
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
    found = []
    for path in (listed.path for listed in list_checkpoints(directory) if not listed.path.is_symlink()):
        try:
            found += [path] if is_checkpoint_file(path) else []
        except OSError:
            found.append(path)
    return sorted(found)


def count_folder_names(listed: Sequence[Listed]) -> Counter[str]:
    """Count how many records of a directory name each folder in it.

    A link to a record names the same folder as the record, so it is not counted. For a broken record, every folder of
    its name may be its data.
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
    listed = [Listed(path) for path in files]
    data = [files[0].parent / name for name in sorted(count_folder_names(listed))]
    old_folders = [entry.record.trainer_folder for entry in listed if entry.record is not None and entry.record.is_old]
    others = [folder for folder in old_folders if folder is not None and not folder.is_symlink()]
    return [*filter(is_data_folder, data), *others]


def record_of_folder(folder: Path) -> Path | None:
    """Return the record that names the data folder `folder`; None if it is no data folder, or no record names it."""
    listed = list_checkpoints(folder.parent) if is_data_folder(folder) else []
    # A record most likely has the folder's name.
    own = sorted(listed, key=lambda each: name_of(each.path) != folder.name)
    records = ((each.path, each.record) for each in own if not each.path.is_symlink())
    return next((path for path, record in records if record is not None and record.folder == folder.name), None)


def is_data_folder(path: Path) -> bool:
    """Whether a folder, and not a link to one, holds the data of a checkpoint."""
    try:
        return read_beginning(path / STATE_FILE, len(STATE_MARKER)) == STATE_MARKER and not path.is_symlink()
    except OSError:
        return False


def files_in_the_way(directory: str | os.PathLike[str]) -> list[Path]:
    """Return files and folders that have a record name of the `Checkpoint` callback and are not checkpoints.

    A program killed while writing leaves one, empty or truncated. A save refuses to replace it.

    Raises:
        OSError: One cannot be read.
    """
    try:
        paths = [Path(directory, name) for name in sorted(os.listdir(directory)) if name.endswith(RECORD_SUFFIXES)]
    except FileNotFoundError:
        return []
    return [path for path in paths if is_record_of_callback(path) and is_in_the_way(path)]


def is_in_the_way(record: Path) -> bool:
    """Whether something that is not a checkpoint is at `record`. A symbolic link does not count: a save replaces it."""
    return os.path.lexists(record) and not record.is_symlink() and not is_checkpoint_file(record)
