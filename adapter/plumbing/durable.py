"""Write files that are either complete or absent, also after a power cut.

The protocol is the one that databases use: write under a temporary name in the destination directory, ``fsync`` the
file, rename it, ``fsync`` the directory. A rename within a directory is atomic on POSIX file systems. Without the first
sync, the new name may become durable before the bytes; without the second one, it may be lost.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from .safe_open import file_mode, folder_mode

TEMPORARY_PREFIX = ".tmp-"
"""Start of every temporary name. Leftovers of killed processes are recognized by it."""
_TEMPORARY_FILE = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}.+-\d+-[0-9a-f]{{8}}", re.DOTALL)
_MAY_BE_WRITTEN_S = 60


def temporary_name(name: str) -> str:
    """Return a name for the same folder that no other process uses."""
    return f"{TEMPORARY_PREFIX}{name}-{os.getpid()}-{secrets.token_hex(4)}"


def fsync_directory(directory: str | os.PathLike[str]) -> None:
    """Make renames and new names within `directory` durable, if its file system can sync a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync a directory, and need not, return this
            raise
    finally:
        os.close(descriptor)


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Bring the content of a file that other code wrote to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_debris(directory: str | os.PathLike[str]) -> list[str]:
    """Remove the temporary files that killed processes left in `directory`; return their names.

    Only the process that holds the lock of the directory may call it. A file that was changed within the last minute
    stays, because another command may be writing it.
    """
    removed = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _TEMPORARY_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime < _MAY_BE_WRITTEN_S:
                    continue
                os.unlink(entry)
                removed.append(entry.name)
    return removed


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to start writing these bytes to disk, so that a later ``fsync`` is short. This is only a hint.

    Linux starts to write dirty pages that are marked as not needed, and keeps them until they are written. An error of
    the disk is reported by the later ``fsync``.
    """
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; a single ``os.write`` may stop short."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def make_directory(path: str | os.PathLike[str], *, shared: bool | None = False) -> None:
    """Make a directory and its missing parents; each is durable when this returns.

    Args:
        path: The directory; an existing one stays as it is.
        shared: Who may enter a new one: True leaves that to the umask, False admits only this user, None follows the
            folder in which it is made.

    Raises:
        FileExistsError: Another kind of file is at `path`.
        NotADirectoryError: A part of `path` is not a directory.
        OSError: It cannot be made.
    """
    directory = Path(path).absolute()
    missing = itertools.takewhile(lambda each: not each.is_dir(), (directory, *directory.parents))
    for each in reversed([*missing]):
        mode = folder_mode(each.parent) if shared is None else 0o777 if shared else 0o700
        try:
            each.mkdir(mode, exist_ok=True)
        except FileExistsError:
            if each == directory:
                raise
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path)) from None
        _fsync_if_readable(each.parent)


def create_file(path: Path) -> None:
    """Make an empty file with the permissions of `write_bytes_durably`, for other code to write into."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode(path.parent)))


def write_proven(target: Path, write: Callable[[Path], object], prove: Callable[[Path], object]) -> Path:
    """Replace the file `target`, completely or not at all; return its absolute path when it is durable.

    Args:
        target: The file; its folder is made if it does not exist.
        write: Writes to a path with a temporary name in the same folder.
        prove: Reads the written file, for example as its later readers will, and raises if that fails.
    """
    target = target.absolute()
    make_directory(target.parent, shared=None)
    temporary = target.with_name(temporary_name(target.name))
    try:
        create_file(temporary)
        write(temporary)
        prove(temporary)
        fsync_file(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)
    return target


def _fsync_if_readable(directory: Path) -> None:
    try:
        fsync_directory(directory)
    except PermissionError:  # a folder that this user may write to but not list cannot be opened to sync it
        return


def write_bytes_durably(
    path: str | os.PathLike[str], data: bytes, *, mode: int | None = None, waits_for_disk: bool = True
) -> None:
    """Replace the file at `path` by `data`, completely or not at all, and durable when this returns.

    Args:
        path: The file.
        data: Its new content.
        mode: Permissions before the umask; None admits only this user, except in a shared folder.
        waits_for_disk: Whether to wait until the file is on disk. Otherwise it survives a kill, but not a power cut.

    Raises:
        OSError: The bytes could not be written; the old file, if any, is untouched and no temporary file remains.
    """
    target = Path(path)
    temporary = target.with_name(temporary_name(target.name))
    mode = file_mode(target.parent) if mode is None else mode
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
