"""Proof that a checkpoint is what was saved: its record's digest, then size and digest of every file.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ....adapter.contract.exceptions import BrokenCheckpointError
from ....adapter.plumbing.safe_open import UnsafeFileError, read_regular
from ..storage.write_file import hash_file
from .layout import record_path
from .record import CheckpointRecord, FileEntry
from .record_file import digest_of, read_record

__all__ = ["check_file", "find_file", "read_proven", "verify", "verify_files"]


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
