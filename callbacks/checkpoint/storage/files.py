"""Files that are durable, and proven to hold what memory held: when they are written, and when they are read.

While a file is written the disk works with it: each chunk is handed over to it at once, so that the sync at the end
finds little left to do. Chunks are large, because a thread that comes back from a system call waits for the
interpreter, and a busy training thread keeps it for milliseconds.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from ....adapter.contract.exceptions import (
    BrokenCheckpointError,
    CheckpointError,
    UnwrittenCheckpointError,
)
from ....adapter.plumbing.durable import start_writeback, write_all
from ....adapter.plumbing.safe_open import UnsafeFileError, open_regular, read_regular
from ..format.record import CheckpointRecord, FileEntry, digest_of, name_of, read_record, record_path

__all__ = [
    "check_file",
    "find_file",
    "hash_file",
    "missing_file",
    "naming_the_checkpoint",
    "read_proven",
    "verify",
    "verify_files",
    "write_file",
]

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
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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
        reason = error.strerror or str(error)
        directory = os.fspath(record.parent)
        raise UnwrittenCheckpointError(
            name_of(record), directory, nbytes, error.errno, reason, error.filename
        ) from error


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
        path = find_file(record, entry)
        try:
            size, digest = hash_file(path, most=entry.size)
        except OSError as error:
            raise BrokenCheckpointError(record.name, f"{entry.path} cannot be read: {error.strerror}") from error
        check_file(record, entry, size, digest)


def find_file(record: CheckpointRecord, entry: FileEntry) -> Path:
    """Where a file of `record` lies, after comparing its size, which costs nothing.

    Raises:
        BrokenCheckpointError: It is missing, or has another size.
    """
    path = record.path.parent / entry.path
    try:
        status = path.stat()
    except OSError as error:
        raise BrokenCheckpointError(record.name, f"{entry.path} cannot be read: {error.strerror}") from error
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise BrokenCheckpointError(record.name, f"{entry.path} is not a regular file")
    if size != entry.size:
        raise BrokenCheckpointError(
            record.name, f"{entry.path} has {size:,} bytes, but its record says {entry.size:,} bytes"
        )
    return path


def missing_file(record: CheckpointRecord) -> str:
    """Why a file of a checkpoint is not there in its size; empty where all are. None is read."""
    try:
        for entry in record.files:
            find_file(record, entry)
    except BrokenCheckpointError as error:
        return error.reason
    return ""


def read_proven(record: CheckpointRecord, entry: FileEntry) -> bytes:
    """The content of a file of `record`.

    Raises:
        BrokenCheckpointError: It is missing or differs from what was saved.
    """
    try:
        data = read_regular(find_file(record, entry), limit=entry.size)
    except UnsafeFileError as error:
        raise BrokenCheckpointError(record.name, f"{entry.path} cannot be read: {error.strerror}") from error
    check_file(record, entry, len(data), digest_of(data))
    return data


def check_file(record: CheckpointRecord, entry: FileEntry, size: int, digest: str) -> None:
    """Compare what was read with what the record says.

    Raises:
        BrokenCheckpointError: They differ.
    """
    if (size, digest) != (entry.size, entry.xxh3_128):
        raise BrokenCheckpointError(
            record.name, f"{entry.path} has digest {digest} ({size:,} bytes), but its record says {entry.xxh3_128}"
        )
