"""Files that are whole or absent, also after a power cut.

The protocol is the one that databases use: write under a temporary name in the destination directory, ``fsync`` the
file, rename it, ``fsync`` the directory. A rename within a directory is atomic on POSIX file systems; without the two
syncs it may become durable before the bytes it names.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

__all__ = [
    "TEMPORARY_PREFIX",
    "fsync_directory",
    "fsync_file",
    "start_writeback",
    "temporary_name",
    "write_all",
    "write_bytes_durably",
]

TEMPORARY_PREFIX = ".tmp-"
"""Start of every temporary name, so that debris of a killed process can be distinguished from data and removed."""


def temporary_name(name: str) -> str:
    """A name for the same folder that no other process uses."""
    return f"{TEMPORARY_PREFIX}{name}-{os.getpid()}-{secrets.token_hex(4)}"


def fsync_directory(directory: str | os.PathLike[str]) -> None:
    """Make renames and new names within `directory` durable, where its file system can sync a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems answer that have no such thing, and need none
            raise
    finally:
        os.close(descriptor)


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Bring the content of a file, which something else wrote, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with bytes that were written, so that a later ``fsync`` is short. A hint, and no promise.

    Linux starts to write dirty pages that are called unneeded, and keeps them until they are written. An error of the
    disk is reported by that ``fsync``.
    """
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; ``os.write`` alone may stop short."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def write_bytes_durably(
    path: str | os.PathLike[str], data: bytes, *, mode: int = 0o644, waits_for_disk: bool = True
) -> None:
    """Replace the file at `path` by `data`, whole or not at all, and durable when this returns.

    Without `waits_for_disk` the file survives a kill and no power cut.

    Raises:
        OSError: The bytes could not be written; the old file, if any, is untouched and no temporary file remains.
    """
    target = Path(path)
    temporary = target.with_name(temporary_name(target.name))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(descriptor, data)
            if waits_for_disk:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if waits_for_disk:
        fsync_directory(target.parent)
