"""Permissions of what genlight makes: for this user alone, except in a folder that is shared on purpose."""

from __future__ import annotations

import os
import stat

__all__ = ["ROOT", "file_mode", "folder_mode", "is_own_group"]

ROOT = 0
"""The user and the group of the administrator."""


def file_mode(directory: str | os.PathLike[str]) -> int:
    """Permissions for a new file in `directory`, before the umask."""
    return 0o666 if _is_shared(directory) else 0o600


def folder_mode(directory: str | os.PathLike[str]) -> int:
    """Permissions for a new folder in `directory`, before the umask."""
    return 0o777 if _is_shared(directory) else 0o700


def _is_shared(directory: str | os.PathLike[str]) -> bool:
    """Whether others are to use what lies in `directory`: they may write there, or it is a team's folder (setgid).

    A sticky folder such as ``/tmp`` is not shared: others may write there, but not use what is ours.
    """
    status = os.stat(directory)
    is_of_team = status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IRGRP
    writes = status.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not status.st_mode & stat.S_ISVTX
    if not is_of_team and not writes:
        return False
    is_our_group = status.st_gid == ROOT or is_own_group(status.st_gid)
    return bool(not is_our_group or (writes and status.st_mode & stat.S_IWOTH))


def is_own_group(gid: int) -> bool:
    """Whether a group has this user alone, as where each user has a group of its own name and a umask of 002."""
    import grp  # here: only POSIX has them, and files can be read elsewhere
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    # To ask for all users whose first group it is would take minutes where a directory service knows them.
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
