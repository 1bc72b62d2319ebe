"""Checkpoint files on disk: written so that a checkpoint is complete or absent after any kill; verified; removed.

1. All files are written into a temporary folder inside the destination directory, each followed by ``fsync``. Each is
   read back and compared with the digest that was taken from memory before the write. A file shared with earlier
   checkpoints is linked.
2. The record is written there in the same way, under a temporary name. The folder is renamed to its name, and the
   directory is synced.
3. The record is renamed out of the folder to its own name, and the directory is synced. This is the commit: a rename
   within a file system is atomic.

Deleting reverses the order: the record is renamed into the folder, under a temporary name, and then both are removed.
A killed process leaves either temporary files, or a data folder that no record names and that holds its own record
under a temporary name. `sweep` removes both, and nothing more. What belongs to others (see `listing`) is never
replaced, moved or removed. One exception: a run renames a file in its own folder if it has the name of a checkpoint
that the run will save (`move_out_of_the_way`).

While a file is written, the disk already works on it: each chunk is passed to the disk at once, so that the sync at
the end has little left to do. Chunks are large, because a thread that returns from a system call waits for the
interpreter lock, and a busy training thread holds that for milliseconds.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError, UnwrittenCheckpointError
from ...adapter.plumbing.durable import fsync_directory, make_directory, start_writeback, temporary_name, write_all
from ...adapter.plumbing.safe_open import file_mode, folder_mode, open_regular, read_regular
from .format.record import (
    LARGEST_RECORD_BYTES,
    SCORES_FILE,
    TRAINER_FOLDER,
    CheckpointRecord,
    FileEntry,
    digest_of,
    is_temporary,
    name_of,
    read_record,
    record_path,
    serialise_record,
)
from .listing import Listed, count_folder_names, is_checkpoint_file, is_data_folder, is_in_the_way, list_checkpoints

log = logging.getLogger(__name__)

_Parsed = TypeVar("_Parsed")

_WRITE_CHUNK = 16 << 20
_JOINED_BUFFER = 1 << 20
"""Smaller buffers are copied, because that is cheaper than one system call for each."""
_LEAST_READ, _MOST_READ = 1 << 20, 16 << 20
"""Limits on the bytes of one read; between them, a read takes a hundredth of the file."""


def write_file(path: Path, buffers: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, durable when this returns, and prove that it reads back as the bytes in memory.

    Returns:
        Its size in bytes and the xxh3-128 of its content, taken from memory.

    Raises:
        BrokenCheckpointError: The file reads back differently.
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
        error.filename = os.fspath(path)  # a call on a descriptor does not report its file
        raise
    finally:
        os.close(descriptor)
    if read_back != (size, hasher.hexdigest()):
        raise BrokenCheckpointError(path.parent.name, f"{path.name} reads back differently from what was written")
    return read_back


def _chunks(buffers: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield `buffers` in portions for one system call each: small ones joined, large ones cut."""
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


def hash_file(path: Path) -> tuple[int, str]:
    """Return size and xxh3-128 of a file.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    descriptor = open_regular(path)
    try:
        return _hash_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _hash_descriptor(descriptor: int, most: int | None = None) -> tuple[int, str]:
    """Return size and xxh3-128 of an open file; stop soon after `most` bytes, even if the file grows."""
    hasher, position = xxhash.xxh3_128(), 0
    size = os.fstat(descriptor).st_size
    buffer = memoryview(bytearray(max(1, min(size, _MOST_READ, max(_LEAST_READ, size // 100)))))
    while (most is None or position <= most) and (count := os.preadv(descriptor, [buffer], position)):
        hasher.update(buffer[:count])
        position += count
    return position, hasher.hexdigest()


@contextlib.contextmanager
def name_checkpoint_in_errors(record: Path, nbytes: int | None = None) -> Iterator[None]:
    """Turn an `OSError` in the block into one that names the checkpoint of `record` and its approximate size `nbytes`.

    Raises:
        UnwrittenCheckpointError: In place of an `OSError` that is not a `CheckpointError` already.
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
    """Return the record of the checkpoint at `path`, after proving that the checkpoint is complete.

    Raises:
        BrokenCheckpointError: A file is missing, short, long or changed; names it and its actual size or digest.
        FileNotFoundError: There is no such checkpoint.
    """
    record = read_record(record_path(path))
    verify_files(record)
    return record


def verify_files(record: CheckpointRecord, only: Sequence[FileEntry] | None = None) -> None:
    """Prove all files that `record` names, or only those in `only`.

    Raises:
        BrokenCheckpointError: One is missing or differs from what was saved.
    """
    for entry in record.files if only is None else only:
        with open_file_of(record, entry) as file:
            check_file(record, entry, *_hash_descriptor(file.fileno(), entry.size))


@contextlib.contextmanager
def open_file_of(record: CheckpointRecord, entry: FileEntry) -> Iterator[BinaryIO]:
    """Open a file of `record` for reading, after a cheap check of its size.

    Raises:
        BrokenCheckpointError: It is missing, has another size or cannot be read, or the block cannot parse it (raises
            `ValueError`, `EOFError` or `RecursionError`).
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
    """Return the fault of the first file that is missing or has another size, or an empty text. Reads no content."""
    try:
        for entry in record.files:
            with open_file_of(record, entry):
                pass
    except BrokenCheckpointError as error:
        return error.reason
    return ""


def read_proven(record: CheckpointRecord, entry: FileEntry, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    """Return the result of `parse` on the proven content of a file of `record`.

    Raises:
        BrokenCheckpointError: It is missing, differs from what was saved, or cannot be parsed.
    """
    with open_file_of(record, entry) as file:
        data = file.read(entry.size)
        check_file(record, entry, len(data), digest_of(data))
        return parse(data)


def check_file(record: CheckpointRecord, entry: FileEntry, size: int, digest: str) -> None:
    """Compare the size and digest of a file with its record.

    Raises:
        BrokenCheckpointError: They differ.
    """
    if (size, digest) != (entry.size, entry.xxh3_128):
        text = f"{entry.path} has digest {digest} ({size:,} bytes), but its record says {entry.xxh3_128}"
        raise BrokenCheckpointError(record.name, text)


def require_replaceable(record: Path) -> None:
    """Raise if a record would replace something that is not a checkpoint.

    Raises:
        CheckpointError: Such a file or folder exists.
    """
    if is_in_the_way(record):
        raise CheckpointError(
            f"{record} is not a checkpoint and is not overwritten; move it away, or choose another place"
        )


def move_out_of_the_way(path: Path) -> Path:
    """Rename the foreign file `path` to the first free ``NAME.not-a-checkpoint-1``; return the new path."""
    names = (f"{path.name}.not-a-checkpoint-{number}" for number in itertools.count(1))
    free = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    os.rename(path, free)
    return free


def _sole_owner_of_its_folder(record: Path, named: Counter[str] | None = None) -> CheckpointRecord | None:
    """Return the checkpoint at `record` if no other record uses its data folder.

    None for a link, because its target is another checkpoint, and for a broken record, because its folder is unknown.
    """
    if record.is_symlink():
        return None
    try:
        parsed = read_record(record)
    except (FileNotFoundError, BrokenCheckpointError):
        return None
    if parsed.data_path is None or not is_data_folder(parsed.data_path):
        return None
    named = count_folder_names(list_checkpoints(record.parent)) if named is None else named
    return parsed if named[parsed.data_path.name] == 1 else None


_SPACE_FOR_THE_REST = 1 << 20
"""Bytes for headers, the record and folders, in addition to tensors and JSON."""


def require_space(directory: Path, needed: int) -> None:
    """Raise if a checkpoint with `needed` bytes of tensors and JSON does not fit.

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
    """The temporary folder of a checkpoint while it is made."""

    record: Path
    path: Path

    def folder(self, name: str = TRAINER_FOLDER) -> Path:
        """Return the folder `name` within the temporary folder, made on first use."""
        folder = self.path / name
        make_directory(folder, shared=None)
        return folder

    def discard(self) -> None:
        """Remove the folder; does nothing after the commit."""
        _remove_tree(self.path)
        _live.discard(self.path.name)


_live: set[str] = set()
"""Temporary names that this process is using; `sweep` does not touch them."""


def stage(path: str | os.PathLike[str]) -> Staging:
    """Make the temporary folder for the checkpoint at `path`.

    Raises:
        UnwrittenCheckpointError: The directory cannot be made or written to.
    """
    record = record_path(path)
    name = temporary_name(name_of(record))
    with name_checkpoint_in_errors(record):
        make_directory(record.parent, shared=None)
        _live.add(name)
        try:
            os.mkdir(record.parent / name, folder_mode(record.parent))
        except OSError:
            _live.discard(name)
            raise
    return Staging(record, record.parent / name)


def commit(staging: Staging, record: CheckpointRecord) -> None:
    """Rename the staged folder to ``NAME`` or, if taken, ``NAME~1``, and write the record; durable when this returns.

    If this replaces an earlier record, the data folder of that record is removed afterwards.

    Args:
        staging: The folder to commit; the caller discards it if this fails.
        record: The record; paths of its files are relative to the staged folder.

    Raises:
        CheckpointError: Something that is not a checkpoint has the record's name.
        UnstorableStateError: The record is larger than the limit.
        OSError: The commit failed. If it failed before the record got its name, only the staged folder of the new
            checkpoint remains. If only the last sync failed, a power cut leaves either the new checkpoint or the old.
    """
    require_replaceable(staging.record)
    directory = staging.record.parent
    first = Path(name_of(staging.record))
    # Insert the number before a suffix: `ModelCheckpoint` with ``FILE_EXTENSION = ".pth"`` finds its last checkpoint
    # by names that begin with ``last`` and end with that suffix.
    numbered = (f"{first.stem}~{number}{first.suffix}" for number in itertools.count(1))
    names = itertools.chain([first.name], numbered)
    folder = next(name for name in names if not os.path.lexists(directory / name))
    files = tuple(replace(file, path=f"{folder}/{file.path}") for file in record.files)
    target, name = directory / folder, temporary_name(staging.record.name)
    replaced = _sole_owner_of_its_folder(staging.record)
    write_file(staging.path / name, [serialise_record(replace(record, folder=folder, files=files))])
    for path, _, _ in os.walk(staging.path, topdown=False):
        fsync_directory(path)
    os.rename(staging.path, target)
    try:
        fsync_directory(directory)
        if replaced is not None and replaced.data_path is not None:
            # If the process dies after the old record is gone, a sweep finds this copy and removes the old folder.
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
        except OSError as error:  # not a failure: the new checkpoint exists, and the next sweep removes the old folder
            log.warning("Could not remove %s: %s", replaced.data_path, error)


def read_pieces(record: CheckpointRecord, entry: FileEntry) -> Iterator[bytes]:
    """Yield the content of a file of `record`, in pieces.

    Raises:
        BrokenCheckpointError: It is missing, has another size or cannot be read.
    """
    with open_file_of(record, entry) as source:
        yield from iter(lambda: source.read(_WRITE_CHUNK), b"")


def copy_checkpoint(
    record: CheckpointRecord,
    directory: Path,
    read: Callable[[FileEntry], Iterator[bytes | memoryview]] | None = None,
) -> None:
    """Copy a checkpoint to `directory`, complete and durable when this returns.

    Args:
        record: The checkpoint.
        directory: The folder of the copy's record.
        read: Returns the content of a file; called for the files in their order. None reads the files next to `record`.

    Raises:
        BrokenCheckpointError: A file differs from its record.
        UnwrittenCheckpointError: It could not be written; nothing of it remains.
    """
    files = tuple(replace(entry, path=record.file_name(entry)) for entry in record.files)
    staging = stage(directory / record.path.name)
    try:
        with name_checkpoint_in_errors(staging.record, record.size_bytes):
            for entry, file in zip(record.files, files, strict=True):
                target = staging.path / file.path
                make_directory(target.parent, shared=None)
                pieces = read_pieces(record, entry) if read is None else read(entry)
                check_file(record, entry, *write_file(target, pieces))
            commit(staging, replace(record, folder=None, files=files))
    except BaseException:
        staging.discard()
        raise


def delete_checkpoint(path: str | os.PathLike[str], named: Counter[str] | None = None) -> None:
    """Remove a checkpoint, its record first. For a link, remove only the link. A missing checkpoint is no error.

    Files that do not belong to the checkpoint stay, also within its folder.

    Args:
        path: The checkpoint.
        named: The `count_folder_names` of its directory; None computes them.

    Raises:
        CheckpointError: Something that is not a checkpoint is at `path`.
        OSError: A file could not be removed.
    """
    record = record_path(path)
    if not os.path.lexists(record):
        return
    target = Path(os.path.realpath(record))
    if target.exists() and not is_checkpoint_file(target):
        raise CheckpointError(f"{record} is not a checkpoint and is not removed")
    sole = _sole_owner_of_its_folder(record, named)
    if sole is None or sole.data_path is None:
        record.unlink(missing_ok=True)
    else:
        os.rename(record, sole.data_path / temporary_name(record.name))
    # Synced before the folder goes: otherwise a power cut could leave a record without its files.
    fsync_directory(record.parent)
    if sole is not None:
        _remove_data(sole)


def _remove_data(record: CheckpointRecord) -> None:
    """Remove the data folder of an already removed `record`, except files that do not belong to its checkpoint.

    Raises:
        OSError: A file could not be removed.
    """
    folder = record.data_path
    assert folder is not None
    listed = {record.file_name(file) for file in record.files} | {SCORES_FILE}
    own: list[Path] = []
    foreign: list[Path] = []
    for path, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(path, name)))):
            file = Path(path, name)
            is_own = file.relative_to(folder).as_posix() in listed or is_temporary(name)
            (own if is_own else foreign).append(file)
    if not foreign:
        # Rename the folder to a temporary name first, so that after a kill during the removal `sweep` removes the rest.
        aside = folder.with_name(temporary_name(folder.name))
        os.rename(folder, aside)
        _remove_tree(aside)
        return
    names = ", ".join(sorted(path.relative_to(folder).as_posix() for path in foreign))
    log.warning("%s stays, because it contains files that do not belong to the checkpoint: %s", folder, names)
    for file in sorted(own, key=lambda path: is_temporary(path.name)):  # the record last: `sweep` needs it
        file.unlink()
    for path, _, _ in os.walk(folder, topdown=False):
        if not os.listdir(path):
            os.rmdir(path)


def sweep(directory: str | os.PathLike[str], listed: Sequence[Listed] | None = None) -> list[str]:
    """Remove what killed processes left in a checkpoint directory.

    Only the run that trains in the directory may call it: temporary files of another live process would be removed.

    Args:
        directory: The directory.
        listed: Result of `list_checkpoints` for it; None lists them.

    Returns:
        The removed names.
    """
    directory = Path(directory)
    try:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    swept: list[str] = []
    left: dict[str, CheckpointRecord] = {}
    """Folders that hold their own record."""
    for entry in entries:
        if entry.is_symlink():
            continue
        if is_temporary(entry.name) and entry.name not in _live:
            _remove_tree(directory / entry.name)
            swept.append(entry.name)
        elif entry.is_dir() and (record := _record_within(directory / entry.name)) is not None:
            left[entry.name] = record
    named = count_folder_names(list_checkpoints(directory) if listed is None else listed) if left else ()
    for name in left.keys() - named:
        _remove_data(left[name])
        swept.append(name)
    if swept:
        log.info("Removed leftovers of an interrupted run in %s: %s", directory, ", ".join(swept))
    return swept


def _record_within(folder: Path) -> CheckpointRecord | None:
    """Return the record that a kill left in its own data folder: a commit moves it out, and a removal back in."""
    for name in filter(is_temporary, os.listdir(folder)):
        with contextlib.suppress(BrokenCheckpointError, OSError):
            record = read_record(folder / name)
            if record.folder == folder.name:
                return replace(record, path=folder.parent / name)
    return None


def _remove_tree(path: Path) -> None:
    """Remove a temporary folder or file. If that fails, warn and leave it to the next sweep."""
    try:
        if path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("Could not remove %s: %s", path, error)
