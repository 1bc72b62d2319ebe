"""Files that several checkpoints have in common: hard links where there are such, else one file that records name.

A hard link makes every checkpoint's folder whole by itself: it can be removed, copied or moved without a look at the
others, and the bytes go with the last of the links. Where the file system has none, the file lies in ``shared/`` beside
the records. It is put there before the first record names it and goes after the last one that did, so that a process
may die at any moment: what no record names is debris, which a sweep removes.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from ....adapter.contract.exceptions import CheckpointError
from ....adapter.plumbing.durable import fsync_directory
from ..format.layout import SHARED_FOLDER, shared_digest, shared_name
from ..ownership import claims_in, is_shared_file
from .write_file import hash_file

__all__ = [
    "Identity",
    "claim",
    "has_links",
    "identity_of",
    "is_whole",
    "link",
    "put_beside",
    "release",
    "remove_if_empty",
    "unclaim",
]

Identity = tuple[int, int, int]
"""Inode, bytes and time of change: what an unchanged file still has."""

_in_use: Counter[Path] = Counter()
"""How many saves need each of the files beside the records of this process's directories, before a record names it."""


def identity_of(path: Path) -> Identity | None:
    """What tells the file at `path` from one that was put in its place, or written to; None where there is none."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def link(source: Path, target: Path, expected: Identity) -> bool:
    """Make `target` a hard link to `source`; False, and nothing is made, where that is not possible or not `expected`.

    Raises:
        OSError: The folder of `target` cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if identity_of(source) != expected:
        return False
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no links, too many of them, or not allowed to this user: then it is written once more
        return False
    if identity_of(target) == expected:
        return True
    os.unlink(target)
    return False


def has_links(file: Path) -> bool:
    """Whether the file system of `file` has hard links, and this user may make them; found out by making one."""
    probe = file.with_name(f"{file.name}.link")
    try:
        os.link(file, probe)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        return False
    os.unlink(probe)
    return True


def put_beside(file: Path, directory: Path, digest: str) -> Path:
    """Move the whole, synced `file` to ``shared/<digest>/`` of `directory`; durable there when this returns.

    A file that is there already has the same content, or lost it.

    Raises:
        CheckpointError: ``shared`` leads elsewhere.
        OSError: It cannot be moved.
    """
    target = directory / shared_name(digest, file.name)
    for folder in (directory / SHARED_FOLDER, target.parent):
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a link, and checkpoints are not written through links; remove it")
        folder.mkdir(exist_ok=True)
    os.replace(file, target)
    for folder in (target.parent, directory / SHARED_FOLDER, directory):
        fsync_directory(folder)
    return target


def claim(path: Path) -> None:
    """Have nothing remove the file at `path`, which a record is about to name."""
    _in_use[path] += 1


def unclaim(paths: Iterable[Path]) -> None:
    """Undo `claim` of each of `paths`."""
    _in_use.subtract(paths)


def release(directory: Path, only: Collection[str] | None = None) -> list[Path]:
    """Remove the files in ``shared/`` of `directory` that no record names any longer.

    None where a record cannot be read, which may name them. Files of others stay.

    Args:
        directory: Where the records are.
        only: The digests to look at; None means all.

    Returns:
        What was removed.

    Raises:
        OSError: Something could not be removed.
    """
    found = [path for path in _files_in(directory) if only is None or _digest_of(directory, path) in only]
    if not found:
        return []
    claims = claims_in(directory)
    if claims.unreadable:
        return []
    gone = [path for path in found if _digest_of(directory, path) not in claims.shared and not _in_use[path]]
    for path in gone:
        if path.is_dir():
            path.rmdir()
            continue
        path.unlink()
        remove_if_empty(path.parent)
    remove_if_empty(directory / SHARED_FOLDER)
    return gone


def remove_if_empty(folder: Path) -> None:
    """Remove `folder`, unless something is in it."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def is_whole(path: Path, size: int, digest: str) -> bool:
    """Whether the file at `path` can be read and has this content."""
    try:
        return hash_file(path, most=size) == (size, digest)
    except OSError:
        return False


def _files_in(directory: Path) -> list[Path]:
    """The files of checkpoints in ``shared/`` of `directory`, or the folder of one that lost its file."""
    folder = directory / SHARED_FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = []
    for name in sorted(os.listdir(folder)):
        place = folder / name
        if place.is_symlink() or not place.is_dir() or shared_digest(f"{SHARED_FOLDER}/{name}/any") is None:
            continue
        files = sorted(place.iterdir())
        found += [file for file in files if is_shared_file(file)] if files else [place]
    return found


def _digest_of(directory: Path, path: Path) -> str:
    return path.relative_to(directory / SHARED_FOLDER).parts[0]
