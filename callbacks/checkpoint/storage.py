"""Checkpoints on a disk: whole or absent, whenever the process or the machine dies; proven, and removed.

1. All files are written into a temporary folder inside the destination directory, each followed by ``fsync``, and each
   is read back and compared with the digest that was taken from memory before the write. A file that is shared with
   earlier checkpoints is linked.
2. The record is written there in the same way, under a temporary name. The folder is renamed to its name, and the
   directory synced.
3. The record is renamed out of the folder to its own name, and the directory synced. This is the commit: a rename
   within a file system is atomic.

Deleting goes the other way round: the record is renamed into the folder, under a temporary name, and then both go.
What a killed process leaves is either temporary, or a folder that no record names and whose record lies in it. `sweep`
removes both, and nothing else. What belongs to checkpoints in a directory:

- A file is a record if it says so itself. Under the name ``.ckpt``, a file of ``torch.save`` counts as well, because
  Lightning's own plugin wrote it.
- A folder is the data of a checkpoint if it holds a state file of this format and a record beside it names it; in it
  the files that the record lists.

Everything else belongs to others, also inside a data folder, and so does every symbolic link. It is never replaced,
moved or removed. One exception: a run renames a file in its own folder if it has the name of a checkpoint that the run
will save (`move_out_of_the_way`).

While a file is written the disk works with it: each chunk is handed over to it at once, so that the sync at the end
finds little left to do. Chunks are large, because a thread that comes back from a system call waits for the
interpreter, and a busy training thread keeps it for milliseconds.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError, UnwrittenCheckpointError
from ...adapter.plumbing.durable import fsync_directory, make_directory, start_writeback, temporary_name, write_all
from ...adapter.plumbing.permissions import file_mode, folder_mode
from ...adapter.plumbing.safe_open import open_regular, read_regular
from .format.record import (
    LARGEST_RECORD_BYTES,
    RECORD_MARKER,
    SCORES_FILE,
    STATE_FILE,
    TRAINER_FOLDER,
    CheckpointRecord,
    FileEntry,
    digest_of,
    is_record_of_callback,
    is_temporary,
    is_torch_file,
    name_of,
    read_record,
    record_path,
    record_paths,
    serialise_record,
    step_name,
)

__all__ = [
    "STATE_MARKER",
    "Listed",
    "Staging",
    "check_file",
    "checkpoint_files",
    "commit",
    "delete_checkpoint",
    "files_in_the_way",
    "folders_of_checkpoints",
    "folders_that_are_named",
    "hash_file",
    "is_record",
    "missing_file",
    "move_out_of_the_way",
    "naming_the_checkpoint",
    "opened",
    "read_proven",
    "record_of_folder",
    "records_in",
    "require_replaceable",
    "require_space",
    "stage",
    "sweep",
    "verify",
    "verify_files",
    "write_file",
]

log = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")

_NUMBER = re.compile(r"(?<=.)~\d+(?=(\.[^.~]*)?\Z)", re.DOTALL)
"""The number of a further data folder for the same name of a checkpoint, as in ``last~1`` or ``last~1.pth``."""
_WRITE_CHUNK = 16 << 20
_JOINED_BUFFER = 1 << 20
"""Smaller buffers are copied, which is cheaper than a system call for each."""
_LEAST_READ, _MOST_READ = 1 << 20, 16 << 20
"""Bytes that are read at once; in between, a hundredth of the file."""


def write_file(path: Path, buffers: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, durable when this returns, and prove that it holds what memory held.

    Returns:
        Its size in bytes and the xxh3-128 of its content, taken from memory.

    Raises:
        BrokenCheckpointError: The file reads back otherwise.
        OSError: It could not be written; has its path as ``filename``.
    """
    hasher, size = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode(path.parent))
    try:
        for chunk in _chunks(buffers):
            hasher.update(chunk)
            write_all(descriptor, chunk)
            start_writeback(descriptor, size, len(chunk))
            size += len(chunk)
        os.fsync(descriptor)
        read_back = _hash_descriptor(descriptor)
    except OSError as error:
        error.filename = os.fspath(path)  # A call on a descriptor names none.
        raise
    finally:
        os.close(descriptor)
    if read_back != (size, hasher.hexdigest()):
        raise BrokenCheckpointError(path.parent.name, f"{path.name} reads back differently from what was written")
    return read_back


def _chunks(buffers: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """`buffers` for a system call each: small ones joined, large ones cut."""
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if len(view) < _JOINED_BUFFER and len(joined) < _WRITE_CHUNK:
            joined += view
            continue
        if joined:
            yield bytes(joined)
            joined.clear()
        yield from (view[at : at + _WRITE_CHUNK] for at in range(0, len(view), _WRITE_CHUNK))
    if joined:
        yield bytes(joined)


def hash_file(path: Path, *, most: int | None = None) -> tuple[int, str]:
    """Size and xxh3-128 of the content of a file; ends soon after `most` bytes, whatever grows there.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    descriptor = open_regular(path)
    try:
        return _hash_descriptor(descriptor, most)
    finally:
        os.close(descriptor)


def _hash_descriptor(descriptor: int, most: int | None = None) -> tuple[int, str]:
    hasher, position = xxhash.xxh3_128(), 0
    size = os.fstat(descriptor).st_size
    buffer = memoryview(bytearray(max(1, min(size, _MOST_READ, max(_LEAST_READ, size // 100)))))
    while (most is None or position <= most) and (count := os.preadv(descriptor, [buffer], position)):
        hasher.update(buffer[:count])
        position += count
    return position, hasher.hexdigest()


@contextlib.contextmanager
def naming_the_checkpoint(record: Path, nbytes: int | None = None) -> Iterator[None]:
    """Raise an `OSError` of the block as one that names the checkpoint of `record`, of about `nbytes` bytes.

    Raises:
        UnwrittenCheckpointError: In place of any other `OSError`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        name, directory = name_of(record), os.fspath(record.parent)
        reason = error.strerror or str(error)
        raise UnwrittenCheckpointError(name, directory, nbytes, error.errno, reason, error.filename) from error


def verify(path: str | os.PathLike[str]) -> CheckpointRecord:
    """The record of the checkpoint at `path`, after proving the checkpoint whole.

    Raises:
        BrokenCheckpointError: A file is missing, short, long or changed; names it and what was found.
        FileNotFoundError: There is no such checkpoint.
    """
    record = read_record(record_path(path))
    verify_files(record)
    return record


def verify_files(record: CheckpointRecord, only: Sequence[FileEntry] | None = None) -> None:
    """Prove the files that `record` names, or `only` some of them.

    Raises:
        BrokenCheckpointError: One is missing or differs from what was saved.
    """
    for entry in record.files if only is None else only:
        with opened(record, entry) as file:
            check_file(record, entry, *_hash_descriptor(file.fileno(), entry.size))


@contextlib.contextmanager
def opened(record: CheckpointRecord, entry: FileEntry) -> Iterator[BinaryIO]:
    """A file of `record` to read from, once its size was compared, which costs nothing.

    Raises:
        BrokenCheckpointError: It is missing, has another size or cannot be read, or its content is not what the block
            expects, which raises `ValueError`, `EOFError` or `RecursionError`.
    """
    try:
        with os.fdopen(open_regular(record.path.parent / entry.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size:
                text = f"{entry.path} has {size:,} bytes, but its record says {entry.size:,} bytes"
                raise BrokenCheckpointError(record.name, text)
            yield file
    except OSError as error:
        raise BrokenCheckpointError(record.name, f"{entry.path} cannot be read: {error.strerror}") from error
    except (ValueError, EOFError, RecursionError) as error:
        raise BrokenCheckpointError(record.name, f"{entry.path} is malformed: {error}") from error


def missing_file(record: CheckpointRecord) -> str:
    """Why a file of a checkpoint cannot be opened or has another size; empty where all are there. None is read."""
    try:
        for entry in record.files:
            with opened(record, entry):
                pass
    except BrokenCheckpointError as error:
        return error.reason
    return ""


def read_proven(record: CheckpointRecord, entry: FileEntry, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    """What `parse` makes of the content of a file of `record`.

    Raises:
        BrokenCheckpointError: It is missing, differs from what was saved, or cannot be parsed.
    """
    with opened(record, entry) as file:
        data = file.read(entry.size)
        check_file(record, entry, len(data), digest_of(data))
        return parse(data)


def check_file(record: CheckpointRecord, entry: FileEntry, size: int, digest: str) -> None:
    """Compare what was read with what the record says.

    Raises:
        BrokenCheckpointError: They differ.
    """
    if (size, digest) != (entry.size, entry.xxh3_128):
        text = f"{entry.path} has digest {digest} ({size:,} bytes), but its record says {entry.xxh3_128}"
        raise BrokenCheckpointError(record.name, text)


STATE_MARKER = b'{"format":"genlight.training_state"'
"""How every state file begins, so that a data folder can be told from a user's own."""


@dataclass(frozen=True)
class Listed:
    """A file that is a record, or has the name of one: the parsed record, or why it is broken."""

    path: Path
    record: CheckpointRecord | None
    problem: str = ""
    error: OSError | None = None
    """Why it cannot be told whether it is broken: this user may not read it, for example."""

    @property
    def is_own_but_broken(self) -> bool:
        """Whether it is a record that the `Checkpoint` callback wrote, by its name, and that is broken."""
        return self.record is None and is_record_of_callback(self.path) and is_checkpoint_file(self.path)


def records_in(directory: str | os.PathLike[str]) -> list[Listed]:
    """Every record in `directory`, whole or broken, by name; links are read as what they point to.

    One of an older runtime has a name as that gave it.
    """
    return [listed for path in record_paths(directory) if (listed := _listed(path)) is not None]


def _listed(path: Path) -> Listed | None:
    """None where the file at `path` is of another program, or gone."""
    has_our_name = is_record_of_callback(path)
    try:
        # Another program's JSON may be large, and is not parsed.
        if not has_our_name and path.suffix != ".ckpt" and not _begins_as_record(path):
            return None
        return Listed(path, read_record(path))
    except BrokenCheckpointError as error:
        return Listed(path, None, error.reason) if has_our_name or is_checkpoint_file(path) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        is_ours = has_our_name or path.suffix == ".ckpt"  # by its name, which is all that there is
        return Listed(path, None, f"it cannot be read: {error.strerror}", error) if is_ours else None


def _begins_as_record(path: Path) -> bool:
    """Whether the file at `path` begins as a record does, or is what is left of one that was cut off."""
    with os.fdopen(open_regular(path), "rb") as file:
        beginning = file.read(len(RECORD_MARKER))
    return bool(beginning) and RECORD_MARKER.startswith(beginning)


def is_checkpoint_file(path: Path) -> bool:
    """Whether the file at `path` is the record of a checkpoint, whole or broken, or a ``.ckpt`` file of torch.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file():
        return False
    if is_torch_file(path):
        return path.suffix == ".ckpt"
    try:
        return _begins_as_record(path) or read_record(path).is_old
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
    """The records in `directory`, whole or broken, and ``.ckpt`` files of torch, sorted; no links."""
    found = [listed for listed in records_in(directory) if not listed.path.is_symlink()]
    return [each.path for each in found if each.error is not None or is_checkpoint_file(each.path)]


def folders_that_are_named(listed: Sequence[Listed]) -> Counter[str]:
    """How many of the records of a directory name each folder in it.

    A link names nothing beyond what its target does. Of a broken record every folder of its name may be the data.
    """
    own = [entry for entry in listed if not entry.path.is_symlink()]
    found = Counter(entry.record.folder or "" for entry in own if entry.record is not None)
    if broken := {name_of(entry.path) for entry in own if entry.record is None}:
        names = os.listdir(own[0].path.parent)
        found.update(name for name in names if not broken.isdisjoint((name, _NUMBER.sub("", name))))
    return found


def folders_of_checkpoints(files: Sequence[Path]) -> list[Path]:
    """The folders that the records `files` of one directory name, each once.

    Of an older runtime's record that is the folder of its name, with what its trainer wrote.
    """
    listed = [entry for path in files if (entry := _listed(path)) is not None]
    data = [files[0].parent / name for name in sorted(folders_that_are_named(listed))]
    of_old = [entry.record.trainer_folder for entry in listed if entry.record is not None and entry.record.is_old]
    others = [folder for folder in of_old if folder is not None and not folder.is_symlink()]
    return [*filter(_is_data_folder, data), *others]


def record_of_folder(folder: Path) -> Path | None:
    """The record that names the data folder `folder`; None if it is no data folder, or no record names it."""
    listed = records_in(folder.parent) if _is_data_folder(folder) else []
    own = (entry for entry in listed if entry.record is not None and not entry.path.is_symlink())
    return next((entry.path for entry in own if entry.record and entry.record.folder == folder.name), None)


def require_replaceable(record: Path) -> None:
    """Raise if a record would replace something that is not a checkpoint.

    Raises:
        CheckpointError: There is such a file or folder.
    """
    if _is_in_the_way(record):
        raise CheckpointError(
            f"{record} is not a checkpoint, and is not overwritten; move it away, or choose another place"
        )


def files_in_the_way(directory: str | os.PathLike[str]) -> list[Path]:
    """Files and folders with the name of a record of the `Checkpoint` callback that are no checkpoints.

    A program that was killed while it wrote leaves one, empty or cut off. A save refuses to replace it.

    Raises:
        OSError: One cannot be read.
    """
    try:
        paths = [Path(directory, name) for name in sorted(os.listdir(directory))]
    except FileNotFoundError:
        return []
    return [path for path in paths if is_record_of_callback(path) and _is_in_the_way(path)]


def _is_in_the_way(record: Path) -> bool:
    """Whether something that is not a checkpoint has the name `record`; a symbolic link is replaced itself."""
    return os.path.lexists(record) and not record.is_symlink() and not is_checkpoint_file(record)


def move_out_of_the_way(path: Path) -> Path:
    """Rename `path`, which is not a checkpoint, to the first free ``NAME.not-a-checkpoint-1``; return the new path."""
    names = (f"{path.name}.not-a-checkpoint-{number}" for number in itertools.count(1))
    free = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    os.rename(path, free)
    return free


def _is_data_folder(path: Path) -> bool:
    """Whether a folder, and not a link to one, holds the data of a checkpoint."""
    try:
        with os.fdopen(open_regular(path / STATE_FILE), "rb") as file:
            return file.read(len(STATE_MARKER)) == STATE_MARKER and not path.is_symlink()
    except OSError:
        return False


def _goes_with_its_data(record: Path, named: Counter[str] | None = None) -> CheckpointRecord | None:
    """The checkpoint at `record` if its data folder is its own alone.

    None of a link, whose target is another checkpoint, and of a broken record, which does not say what it named.
    """
    if record.is_symlink():
        return None
    try:
        parsed = read_record(record)
    except (FileNotFoundError, BrokenCheckpointError):
        return None
    if parsed.data_path is None or not _is_data_folder(parsed.data_path):
        return None
    named = folders_that_are_named(records_in(record.parent)) if named is None else named
    return parsed if named[parsed.data_path.name] == 1 else None


_SPACE_FOR_THE_REST = 1 << 20
"""Bytes beside tensors and JSON: headers, the record, folders."""


def require_space(directory: Path, needed: int) -> None:
    """Raise before a checkpoint with `needed` bytes of tensors and JSON that does not fit.

    Raises:
        CheckpointError: The file system has less free space.
    """
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    free, needed = shutil.disk_usage(existing).free, needed + _SPACE_FOR_THE_REST
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs {needed / 1e6:,.1f} MB, but the file system of {directory} has {free / 1e6:,.1f} MB "
            "free; free some space, keep fewer checkpoints, or choose another directory"
        )


@dataclass(frozen=True)
class Staging:
    """The temporary folder of a checkpoint that is being made."""

    record: Path
    path: Path

    def folder(self, name: str = TRAINER_FOLDER) -> Path:
        """A folder within, made on first use."""
        folder = self.path / name
        make_directory(folder, shared=None)
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
        UnwrittenCheckpointError: The directory cannot be made or written to.
    """
    record = record_path(path)
    name = temporary_name(name_of(record))
    with naming_the_checkpoint(record):
        make_directory(record.parent, shared=None)
        _live.add(name)
        try:
            os.mkdir(record.parent / name, folder_mode(record.parent))
        except OSError:
            _live.discard(name)
            raise
    return Staging(record, record.parent / name)


def commit(staging: Staging, record: CheckpointRecord) -> None:
    """Give the staged folder its name, the first that is free, and write the record; durable when this returns.

    What the record before it named, if there was one, is removed then. A final checkpoint leaves an earlier end of its
    run under the name of its step.

    Args:
        staging: What to commit; whoever made it discards it if this fails.
        record: The record, whose files are named relative to the staged folder.

    Raises:
        CheckpointError: Something that is not a checkpoint has the record's name.
        UnstorableStateError: The record is larger than one may be.
        OSError: It could not be done. If the record was not yet renamed, only the staged folder remains of the new
            checkpoint; if only the last sync failed, either it or the old one is there after a power cut.
    """
    require_replaceable(staging.record)
    if record.final:
        _move_older_final(staging.record, record)
    directory = staging.record.parent
    first = Path(name_of(staging.record))
    # Before a suffix: Lightning finds a last checkpoint by what is called ``last….pth`` if that is its extension.
    numbered = (f"{first.stem}~{number}{first.suffix}" for number in itertools.count(1))
    names = itertools.chain([first.name], numbered)
    folder = next(name for name in names if not os.path.lexists(directory / name))
    files = tuple(replace(file, path=f"{folder}/{file.path}") for file in record.files)
    target, name = directory / folder, temporary_name(staging.record.name)
    replaced = _goes_with_its_data(staging.record)
    write_file(staging.path / name, [serialise_record(replace(record, folder=folder, files=files))])
    for path, _, _ in os.walk(staging.path, topdown=False):
        fsync_directory(path)
    os.rename(staging.path, target)
    try:
        fsync_directory(directory)
        if replaced is not None and replaced.data_path is not None:
            # A sweep removes the old folder by this, should the process die when its record is gone.
            content = read_regular(staging.record, limit=LARGEST_RECORD_BYTES)
            write_file(replaced.data_path / temporary_name(staging.record.name), [content])
        os.replace(target / name, staging.record)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(target, staging.path)
        raise
    _live.discard(staging.path.name)
    fsync_directory(directory)
    if replaced is not None:
        try:
            _remove_data(replaced)
        except OSError as error:  # the new one is there, and the next sweep tries again
            log.warning("Could not remove %s: %s", replaced.data_path, error)


def _move_older_final(final: Path, new: CheckpointRecord) -> None:
    """Give the name of its step to the final checkpoint at `final`, if its run has gone on from it to the `new` end.

    It is whole under one of its names at every moment: its files get second names first, and a record of its step.
    Where a whole checkpoint of that step is there already, that one stays in its place. What cannot be moved, as on a
    file system without links, is left to be replaced, with a warning: the new end of the run is worth more. What
    another run left is replaced, too.
    """
    try:
        old = read_record(final)
    except (BrokenCheckpointError, OSError):
        return
    is_earlier_end = old.final and not old.is_old and old.run_id == new.run_id and old.step < new.step
    if final.is_symlink() or not is_earlier_end or old.data_path is None:
        return
    target = final.with_name(f"{step_name(old.step)}.json")
    try:
        try:
            verify(target)
        except (BrokenCheckpointError, OSError):
            _save_as(old, old.data_path, target)
        delete_checkpoint(final)
    except (CheckpointError, OSError) as error:
        log.warning("%s is replaced, since it could not become %s: %s", final, target, error)


def _save_as(old: CheckpointRecord, data: Path, target: Path) -> None:
    """Commit the files of `old` once more, as the checkpoint of its step at `target`."""
    staging = stage(target)
    try:
        for name in [*map(old.file_name, old.files), SCORES_FILE]:
            if name != SCORES_FILE or (data / name).is_file():
                make_directory((staging.path / name).parent, shared=None)
                os.link(data / name, staging.path / name, follow_symlinks=False)
        files = tuple(replace(file, path=old.file_name(file)) for file in old.files)
        commit(staging, replace(old, final=False, files=files))
    except BaseException:
        staging.discard()
        raise


def delete_checkpoint(path: str | os.PathLike[str], named: Counter[str] | None = None) -> None:
    """Remove a checkpoint, its record first; of a link to one, the link. One that is not there is no error.

    What is not of the checkpoint stays, also within its folder.

    Args:
        path: The checkpoint.
        named: The `folders_that_are_named` in its directory; None finds them.

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
    whole = _goes_with_its_data(record, named)
    if whole is None or whole.data_path is None:
        record.unlink(missing_ok=True)
    else:
        os.rename(record, whole.data_path / temporary_name(record.name))
    # Synced before the folder goes: otherwise a power cut could leave a record without its files.
    fsync_directory(record.parent)
    if whole is not None:
        _remove_data(whole)


def _remove_data(record: CheckpointRecord) -> None:
    """Remove the data folder of `record`, which is gone, but for what is not of its checkpoint.

    Raises:
        OSError: Something could not be removed.
    """
    folder = record.data_path
    assert folder is not None
    listed = {record.file_name(file) for file in record.files} | {SCORES_FILE}
    own: list[Path] = []
    foreign: list[Path] = []
    for path, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(path, name)))):
            found = Path(path, name)
            is_own = found.relative_to(folder).as_posix() in listed or is_temporary(name)
            (own if is_own else foreign).append(found)
    if not foreign:
        # Through a temporary name, so that a kill in between leaves nothing that looks whole.
        aside = folder.with_name(temporary_name(folder.name))
        os.rename(folder, aside)
        _remove_tree(aside)
        return
    names = ", ".join(sorted(path.relative_to(folder).as_posix() for path in foreign))
    log.warning("%s stays, because it contains files that do not belong to the checkpoint: %s", folder, names)
    for found in sorted(own, key=lambda path: is_temporary(path.name)):  # the record last, by which a sweep goes on
        found.unlink()
    for path, _, _ in os.walk(folder, topdown=False):
        if not os.listdir(path):
            os.rmdir(path)


def sweep(directory: str | os.PathLike[str], listed: Sequence[Listed] | None = None) -> list[str]:
    """Remove what killed processes left in a checkpoint directory; only the run that holds the directory may.

    Args:
        directory: The directory.
        listed: Its `records_in`; None reads them.

    Returns:
        The names that were removed.
    """
    directory = Path(directory)
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    named = folders_that_are_named(records_in(directory) if listed is None else listed)
    swept = []
    for name in names:
        path = directory / name
        if path.is_symlink():
            continue
        if is_temporary(name) and name not in _live:
            _remove_tree(path)
        elif name not in named and path.is_dir() and (record := _record_within(path)) is not None:
            _remove_data(record)
        else:
            continue
        swept.append(name)
    if swept:
        log.info("Removed what an interrupted run had left in %s: %s", directory, ", ".join(swept))
    return swept


def _record_within(folder: Path) -> CheckpointRecord | None:
    """The record that lies in the data folder which it names, because a killed process did not come to rename it."""
    for name in filter(is_temporary, os.listdir(folder)):
        with contextlib.suppress(BrokenCheckpointError, OSError):
            record = read_record(folder / name)
            if record.folder == folder.name:
                return replace(record, path=folder.parent / name)
    return None


def _remove_tree(path: Path) -> None:
    """Remove a temporary folder or file. One that cannot be removed is left to the next sweep, with a warning."""
    try:
        if path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("Could not remove %s: %s", path, error)
