"""What in a directory belongs to checkpoints: nothing else is ever replaced, moved or removed.

- A file is a record if it says so itself. Under the name ``.ckpt``, a file of ``torch.save`` counts as well, because
  Lightning's own plugin wrote it.
- A folder is the data of a checkpoint if it holds a state file of this format and a record beside it names it.
- A data folder that no record names is debris if a killed process left it: such a folder carries a mark. One with a
  name that the `Checkpoint` callback gives needs none.

Whatever else lies there belongs to others, also inside a data folder. So is every symbolic link.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.safe_open import open_regular
from .format.layout import (
    ARRAYS_FILE,
    FROZEN_FILE,
    MODEL_FILE,
    STATE_FILE,
    TENSORS_FILE,
    TRAINER_FOLDER,
    UNCOMMITTED_FILE,
    folder_names,
    is_name_of_callback,
    is_record_of_callback,
    name_of,
    name_of_folder,
    record_paths,
)
from .format.record_file import RECORD_MARKER, is_torch_file, read_record
from .format.shard_index import rank_of

__all__ = [
    "STATE_MARKER",
    "Claims",
    "DataFolder",
    "checkpoint_files",
    "choose_folder",
    "claims_in",
    "data_of",
    "folders_of_checkpoints",
    "foreign_in",
    "is_checkpoint_file",
    "is_data_folder",
    "is_debris",
    "is_stock_sharded",
    "require_replaceable",
]

STATE_MARKER = b'{"format":"genlight.training_state"'
"""How every state file begins, so that a data folder can be told from a user's own."""

_OWN_NAMES = frozenset({MODEL_FILE, FROZEN_FILE, TENSORS_FILE, ARRAYS_FILE, STATE_FILE, TRAINER_FOLDER})


@dataclass(frozen=True)
class DataFolder:
    """The data folder of a checkpoint."""

    path: Path
    files: frozenset[str] | None
    """What its record lists, relative to `path`; None where no record can be read."""


@dataclass(frozen=True)
class Claims:
    """Which folders of a directory its records name."""

    folders: Mapping[str, int]
    """How many records name each."""
    unreadable: frozenset[str]
    """Names of the records that cannot be read: any folder of such a name may be theirs."""

    def __contains__(self, folder: str) -> bool:
        return folder in self.folders or not self.unreadable.isdisjoint((folder, name_of_folder(folder)))


def claims_in(directory: Path) -> Claims:
    """What the records in `directory` claim; a link claims nothing beyond what its target does."""
    folders, unreadable = Counter[str](), set[str]()
    for path in record_paths(directory):
        if path.is_symlink():
            continue
        try:
            folders[read_record(path).folder or ""] += 1
        except FileNotFoundError:
            continue
        except (BrokenCheckpointError, OSError):
            unreadable.add(name_of(path))
    return Claims(folders, frozenset(unreadable))


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
        return _lost_its_start(path)
    return True


def _lost_its_start(path: Path) -> bool:
    """Whether an unreadable file was the record of the data folder beside it, lest a run cannot save there again."""
    name = name_of(path)
    return (
        is_record_of_callback(path)
        and is_data_folder(path.parent / name)
        and name not in claims_in(path.parent).folders
    )


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
    return (path / UNCOMMITTED_FILE).exists() or is_name_of_callback(name_of_folder(path.name))


def is_stock_sharded(path: Path) -> bool:
    """Whether `path` is a folder that Lightning's sharded strategies wrote as a checkpoint."""
    return path.is_dir() and (path / ".metadata").is_file() and (path / "meta.pt").is_file()


def data_of(record: Path, claims: Claims | None = None) -> list[DataFolder]:
    """The data folder of the checkpoint at `record`; every one it may have had where the record is broken.

    None that another record names, and none of a link, whose target is another checkpoint.

    Args:
        record: The record.
        claims: What the records beside it claim; None reads them all.

    Raises:
        OSError: The record cannot be read.
    """
    if record.is_symlink():
        return []
    try:
        parsed = read_record(record)
    except FileNotFoundError:
        return []
    except BrokenCheckpointError:
        if not is_checkpoint_file(record) or is_torch_file(record):
            return []
        names, files, own = _existing(record.parent, name_of(record)), None, 0
    else:
        names, own = [] if parsed.folder is None else [parsed.folder], 1
        files = frozenset(parsed.file_name(file) for file in parsed.files)
    claims = claims or claims_in(record.parent)
    return [
        DataFolder(record.parent / name, files)
        for name in names
        if claims.folders.get(name, 0) <= own and is_data_folder(record.parent / name)
    ]


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
        except BrokenCheckpointError:
            claims = claims or claims_in(path.parent)
            found.update(dict.fromkeys(folder.path for folder in data_of(path, claims)))
            continue
        folder = path.parent / (record.name if record.is_old else record.folder or "")
        if is_data_folder(folder) or (record.is_old and folder.is_dir() and not folder.is_symlink()):
            found[folder] = None
    return list(found)


def choose_folder(record: Path) -> str:
    """The name for the data folder of a new checkpoint: the first that is free, or held by debris alone.

    Raises:
        OSError: The directory cannot be read.
    """
    claims = None
    for name in folder_names(name_of(record)):
        path = record.parent / name
        if not os.path.lexists(path):
            return name
        claims = claims or claims_in(record.parent)
        if is_debris(path, claims) and not foreign_in(DataFolder(path, None)):
            return name
    raise AssertionError("unreachable: folder_names does not end")


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
    if name == UNCOMMITTED_FILE:
        return True
    if listed is not None:
        return name in listed
    return PurePosixPath(name).parts[0] in _OWN_NAMES or rank_of(name) is not None


def _existing(directory: Path, name: str) -> list[str]:
    """The folders that a checkpoint of this name may have."""
    return [entry for entry in sorted(os.listdir(directory)) if name in (entry, name_of_folder(entry))]
