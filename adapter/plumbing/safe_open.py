"""Open files safely even if another user may have put something in their place, and give new ones permissions.

On a shared machine another user may have planted a symlink to one of our files, a FIFO without a writer, or a lock held
forever. So opening our own file follows no link and never waits; the file must be regular and belong to a trusted user.
Reading has a limit on the size, checked before memory is allocated.

Three users are trusted: this user; root, who can do everything anyway; and the owner of the folder that holds the file,
who could put any file there. The last one also keeps network file systems working that show all files as owned by one
user (``root_squash``, ``all_squash``, a mount with ``uid=``). `distrust` decides once, at the start, whether to trust
the folder itself. New files and folders admit only this user, except in a folder that is shared on purpose.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable

ROOT = 0
"""The user and the group of the administrator."""
PRIVATE_FILE = 0o600


class UnsafeFileError(OSError):
    """The path holds something that must not be opened or read: a link, a pipe, another user's file."""


def open_own(path: str | os.PathLike[str], flags: int, mode: int = PRIVATE_FILE) -> int:
    """Open a file that only we should write (a lock, a journal, a log, a note) and return its descriptor.

    If our own file has wider permissions than `mode`, they are narrowed to it.

    Args:
        path: The file; a link in its last part is not followed.
        flags: Flags of ``os.open``. Not ``O_TRUNC``, because it would act before the file is checked.
        mode: Permissions of a new file.

    Raises:
        UnsafeFileError: It is a link or not a regular file, or belongs to another user; ``strerror`` says which, and
            what to do.
        OSError: It cannot be opened.
    """
    assert not flags & os.O_TRUNC

    def check(descriptor: int, status: os.stat_result) -> None:
        folder, fault = os.stat(os.path.dirname(os.fspath(path)) or "."), None
        if status.st_uid not in (os.geteuid(), ROOT, folder.st_uid):
            fault = f"it belongs to another user (uid {status.st_uid})"
        elif status.st_nlink > 1 and folder.st_uid not in (os.geteuid(), ROOT):
            fault = "it is a second link to a file elsewhere"
        if fault:
            raise UnsafeFileError(errno.EPERM, f"{fault}; remove it, or choose another folder", os.fspath(path))
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & ~mode:
            with contextlib.suppress(PermissionError):  # a file system that keeps no permissions
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & mode)

    return open_checked(path, flags | os.O_NOFOLLOW, mode, check)


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a file for reading and return its descriptor. It may belong to anybody and be behind a link.

    Raises:
        UnsafeFileError: It is a pipe, a device or a socket.
        OSError: It cannot be opened.
    """
    return open_checked(path, os.O_RDONLY)


def open_below(folder: str | os.PathLike[str], path: str) -> int:
    """Open the regular file at `path` below `folder` for reading; follow no link below `folder`.

    For a `path` from an untrusted source: the kernel reports which file was opened, so that nobody can replace a folder
    of the path in the meantime.

    Raises:
        UnsafeFileError: It is not a regular file, a part of `path` is a link, or `path` is absolute or has parts such
            as ``..``.
        OSError: It cannot be opened.
    """
    below = os.path.join(os.path.realpath(folder), path)

    def check(descriptor: int, _: os.stat_result) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") != below:
            raise UnsafeFileError(errno.EINVAL, "it is not a path of names below a folder", path)

    if "\0" in path or os.path.isabs(path):
        raise UnsafeFileError(errno.EINVAL, "it is not a path of names below a folder", path)
    return open_checked(below, os.O_RDONLY | os.O_NOFOLLOW, check=check)


def read_below(folder: str | os.PathLike[str], path: str, *, limit: int) -> bytes:
    """Return the content of the regular file at `path` below `folder`, opened with `open_below`.

    Raises:
        UnsafeFileError: Like `open_below`, or the file is larger than `limit` bytes.
        OSError: It cannot be read.
    """
    return _read(open_below(folder, path), os.path.join(folder, path), limit)


def read_own(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """Return the content of a file that only we should have written.

    Raises:
        UnsafeFileError: Like `open_own`, or the file is larger than `limit` bytes.
        OSError: It cannot be read.
    """
    return _read(open_own(path, os.O_RDONLY), path, limit)


def read_regular(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """Return the content of a file that may belong to anybody.

    Raises:
        UnsafeFileError: Like `open_regular`, or the file is larger than `limit` bytes.
        OSError: It cannot be read.
    """
    return _read(open_regular(path), path, limit)


def read_beginning(path: str | os.PathLike[str], nbytes: int) -> bytes:
    """Return the first bytes of a file that may belong to anybody.

    Raises:
        UnsafeFileError: Like `open_regular`.
        OSError: It cannot be read.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return file.read(nbytes) or b""


def distrust(path: str | os.PathLike[str], *, may_be_sticky: bool = False) -> str | None:
    """Return why another user could change the contents of the directory `path`, or None if nobody could.

    A directory must belong to this user or to root, and no other user may write to it. Four kinds break this rule and
    are safe nonetheless:

    - A group that belongs only to this user (many systems make one for each user), or root's group, which containers
      that run under an arbitrary user rely on.
    - The root of a mounted volume. Only an administrator can mount one, and volumes of containers often belong
      to root and are open to all (``emptyDir``), or to the user outside. Only we can change what we make below it.
    - A file system that keeps no owners or permissions, or shows one user's for all files: a file that we make in the
      directory then shows the same owner as the directory, or more permissions than we asked for. So a probe is made
      before anything is refused. Who else reaches such a file system as the same user cannot be found out.
    - With `may_be_sticky`, a directory like ``/tmp``: others may add files, but can neither remove nor replace ours.

    Directories above `path` are not checked: a user who may rename them got that power from the machine's
    administrator, and refusing them would refuse the common layout of group folders with users' folders inside.

    Raises:
        OSError: The directory cannot be read.
    """
    link, status = os.lstat(path), os.stat(path)
    ours = {os.geteuid(), ROOT}
    strangers = [uid for uid in (link.st_uid, status.st_uid) if uid not in ours]
    writers = _other_writers(status, may_be_sticky=may_be_sticky)
    if not strangers and writers is None:
        return None
    if not stat.S_ISLNK(link.st_mode) and os.path.ismount(path):
        return None
    shown = _status_of_new_file(path)
    strangers = [uid for uid in strangers if shown is None or uid != shown.st_uid]
    if strangers:
        kind = "a link that" if stat.S_ISLNK(link.st_mode) and link.st_uid == strangers[0] else "a directory that"
        return f"it is {kind} belongs to another user (uid {strangers[0]}), who could change its contents"
    if writers is None or (shown is not None and stat.S_IMODE(shown.st_mode) & ~PRIVATE_FILE):
        return None
    return writers


def _other_writers(status: os.stat_result, *, may_be_sticky: bool) -> str | None:
    """Return which other users may write to a directory, in words, or None."""
    if may_be_sticky and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "every user of this machine can write to it (`chmod o-w,g-w` prevents that)"
    if status.st_mode & stat.S_IWGRP and not _is_ours(status.st_gid):
        return f"its group (gid {status.st_gid}) can write to it (`chmod g-w` prevents that)"
    return None


def _status_of_new_file(directory: str | os.PathLike[str]) -> os.stat_result | None:
    """Return the status that the file system shows for a new file of ours, or None if we cannot make one."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            return os.fstat(probe.fileno())
    except OSError:
        return None


def open_checked(
    path: str | os.PathLike[str],
    flags: int,
    mode: int = PRIVATE_FILE,
    check: Callable[[int, os.stat_result], None] | None = None,
) -> int:
    """Open a regular file that `check` accepts; `open_own` and `open_regular` cover most uses.

    Raises:
        UnsafeFileError: It is a link that is not followed, a pipe, a device or a socket, or `check` refused it.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            text = "it is a symbolic link, which is not followed here; remove it"
            raise UnsafeFileError(errno.ELOOP, text, error.filename) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader, a socket
            raise UnsafeFileError(errno.EINVAL, "it is not a regular file", error.filename) from None
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeFileError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if check is not None:
            check(descriptor, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(descriptor: int, path: str | os.PathLike[str], limit: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            text = f"it has {size:,} bytes, and at most {limit:,} are read"
            raise UnsafeFileError(errno.EFBIG, text, os.fspath(path))
        return file.read(size)  # no more than that, even if the file grows meanwhile


def file_mode(directory: str | os.PathLike[str]) -> int:
    """Return the permissions of a new file in `directory`, before the umask."""
    return 0o666 if _is_shared(directory) else 0o600


def folder_mode(directory: str | os.PathLike[str]) -> int:
    """Return the permissions of a new folder in `directory`, before the umask."""
    return 0o777 if _is_shared(directory) else 0o700


def _is_shared(directory: str | os.PathLike[str]) -> bool:
    """Whether other users should use the files in `directory`: they may write there, or it is a team's folder (setgid).

    A sticky folder such as ``/tmp`` is not shared: others may write there, but not use our files.
    """
    status = os.stat(directory)
    is_of_team = status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IRGRP and not _is_ours(status.st_gid)
    return bool(is_of_team) or _other_writers(status, may_be_sticky=True) is not None


def _is_ours(gid: int) -> bool:
    return gid == ROOT or is_own_group(gid)


def is_own_group(gid: int) -> bool:
    """Whether only this user is in a group, as on systems that make a group per user and use a umask of 002."""
    import grp  # here, because only POSIX has these modules and other systems can read files
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    # Listing every user with this primary group would take minutes if a directory service knows them.
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
