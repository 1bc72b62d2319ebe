"""Permissions of new files and folders: only for this user, except in a folder that is shared on purpose."""

from __future__ import annotations

import os
import stat

ROOT = 0
"""The user and the group of the administrator."""


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
    is_of_team = status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IRGRP
    writes = status.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not status.st_mode & stat.S_ISVTX
    if not is_of_team and not writes:
        return False
    is_our_group = status.st_gid == ROOT or is_own_group(status.st_gid)
    return bool(not is_our_group or (writes and status.st_mode & stat.S_IWOTH))


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
