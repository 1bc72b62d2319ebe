"""Checkpoints in the memory of this node: they outlive a killed process, but not the node.

They have the same format as on disk, in a folder of `ROOT` that only this user may enter. That folder has a random
name. A file in the folder of checkpoints on disk contains this name, and a note in the folder in memory contains the
inode of the folder on disk. So a run in a copy of the folder on disk, or in a new folder at the same path, does not use
these checkpoints. On several nodes, the folder in memory has the same name on each node; `peers` copies the checkpoints
from each node to the next.

When training has ended, the folder in memory is removed. If it held a newer checkpoint than the disk, that checkpoint
is copied first.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.durable import make_directory, write_bytes_durably
from ...adapter.plumbing.safe_open import PRIVATE_FILE, UnsafeFileError, read_own
from .format.record import CheckpointRecord
from .listing import Listed, list_checkpoints
from .storage import copy_checkpoint, delete_checkpoint, missing_file, sweep

log = logging.getLogger(__name__)

ROOT = Path(os.path.realpath("/dev/shm"))  # noqa: S108 - a folder in it is proven to be ours whenever it is read
POINTER = ".memory"
"""File in a folder of checkpoints with the name of the folder in memory."""
_NOTE = ".checkpoints-of"
_NAME = re.compile(r"genlight-[\w-]+-[0-9a-f]{16}")
_LARGEST_NOTE = 256
_AT_ONCE, _AT_ONCE_WITH_COPIES = 2, 3
"""Number of checkpoints that need room at once: the last one, the next one, and one on its way to another node."""
_NODES = ("GENLIGHT_NODES", "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
"""Variables with the number of nodes: of ``genlight run --restarts``, of torchrun, of a job step, of a job."""
_CGROUP = Path("/sys/fs/cgroup")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def memory_folder(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder in memory that belongs to `directory`, or None if there is none on this node.

    A folder that another user could have made or changed, or that belongs to another run, is refused with a warning.
    """
    folder = _named_folder(directory)
    if folder is None or not os.path.lexists(folder):
        return None
    if fault := _fault_of(folder, directory):
        _warn_of(folder, fault)
        return None
    return folder


def _named_folder(directory: str | os.PathLike[str]) -> Path | None:
    """Return the path in memory that the folder of checkpoints `directory` names, or None if it names none."""
    try:
        name = read_own(Path(directory) / POINTER, limit=_LARGEST_NOTE).decode()
    except (OSError, ValueError):
        return None
    return ROOT / name if _NAME.fullmatch(name) else None


def memory_id() -> str:
    """Return a text that is the same for all processes that share one `ROOT`; without `ROOT`, for all of a machine."""
    machine = _BOOT_ID.read_text(encoding="ascii").strip()
    try:
        status = os.stat(ROOT)
    except FileNotFoundError:
        return machine
    return f"{machine} {status.st_dev} {status.st_ino}"


@functools.cache
def _warn_of(folder: Path, fault: str) -> None:
    log.warning("The checkpoints in memory, %s, are not used: %s", folder, fault)


def _fault_of(folder: Path, directory: str | os.PathLike[str]) -> str:
    """Return the reason not to use a folder in memory; empty if there is none."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        return "it is a link or a file, not a folder"
    if status.st_uid != os.geteuid():
        return f"the folder belongs to another user (uid {status.st_uid})"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return "other users may enter the folder"
    try:
        owner = read_own(folder / _NOTE, limit=_LARGEST_NOTE)
    except UnsafeFileError as error:
        return f"{_NOTE}: {error.strerror}"
    except OSError:
        owner = b""
    return "" if owner == _note_of(directory) else "the folder belongs to another run"


def _note_of(directory: str | os.PathLike[str]) -> bytes:
    return str(os.stat(directory).st_ino).encode()


def is_in_memory(record: Path) -> bool:
    """Whether `record` is the path of a checkpoint in memory."""
    return record.parent.parent == ROOT and _NAME.fullmatch(record.parent.name) is not None


def list_tiers(directory: str | os.PathLike[str]) -> list[Listed]:
    """Return every record of `directory` and of its folder in memory, oldest step first; for one step, disk is last.

    On several nodes, return only the records on disk: other nodes do not see those in memory.
    """
    folder = None if spans_nodes(os.environ) else memory_folder(directory)
    in_memory = [] if folder is None else list_checkpoints(folder)
    # The run may have removed some of them after they were listed.
    in_memory = [each for each in in_memory if each.record is not None or each.path.exists()]
    return sorted([*in_memory, *list_checkpoints(directory)], key=lambda listed: listed.age)


def spans_nodes(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as part of a run on several nodes."""
    nodes = next((environ[name] for name in _NODES if environ.get(name)), "1")
    return nodes != "1" or environ.get("NODE_RANK", "0") != "0"


def open_memory(
    directory: Path,
    run_id: str,
    nbytes: int,
    loaded: CheckpointRecord | None,
    *,
    has_copies: bool = False,
    name: str | None = None,
) -> Path:
    """Return the folder in memory for `directory`, made if it does not exist.

    Args:
        directory: The folder of checkpoints on disk.
        run_id: Makes the name readable.
        nbytes: Estimated bytes of a checkpoint.
        loaded: The checkpoint from which training continues. Others in memory are removed: they may be newer than it.
        has_copies: Whether checkpoints are also sent to another node.
        name: Name of the folder, which another node has chosen.

    Raises:
        CheckpointError: There is no such memory, or not enough; the message has the figures.
        OSError: The folder cannot be made.
    """
    folder, at_once = memory_folder(directory), _AT_ONCE_WITH_COPIES if has_copies else _AT_ONCE
    for path in [] if folder is None else [each.path for each in list_checkpoints(folder)]:
        if loaded is None or path != loaded.path:
            delete_checkpoint(path)
        else:
            at_once -= 1
    if not ROOT.is_dir():
        raise CheckpointError(f"there is no {ROOT}")
    figures = require_room(at_once * nbytes, f"{at_once} checkpoints")
    if folder is None:
        make_directory(directory, shared=None)
        named = _named_folder(directory)
        if name is None and named is not None and not os.path.lexists(named):
            name = named.name  # this node is new or was started again, and others still have a folder of that name
        name = name or f"genlight-{re.sub(r'[^A-Za-z0-9_-]', '-', run_id)[:40] or 'run'}-{secrets.token_hex(8)}"
        folder = ROOT / name
        folder.mkdir(0o700)
        write_bytes_durably(folder / _NOTE, _note_of(directory), mode=PRIVATE_FILE)
        if named != folder:
            write_bytes_durably(directory / POINTER, folder.name.encode(), mode=PRIVATE_FILE)
    sweep(folder)
    log.info("checkpoints in memory go to %s: %s", folder, figures)
    return folder


def require_room(nbytes: int, what: str) -> str:
    """Return a sentence with the figures if `nbytes` bytes fit into memory. Its subject is `what`.

    Raises:
        CheckpointError: They do not fit.
    """
    room = _room()
    need, has = (f"{size / 1e6:,.1f} MB" for size in (nbytes, room))
    figures = f"{what} need {need}, and {ROOT} has room for {has}"
    if room < nbytes:
        raise CheckpointError(f"{figures}; give it more (`--shm-size` of a container), or save on disk more often")
    return figures


def _room() -> int:
    """Return the bytes that still fit into `ROOT`. The container may have less memory than its file system says."""
    return min(shutil.disk_usage(ROOT).free, free_memory())


def free_memory() -> int:
    """Return the bytes of memory that this machine or container has left; very many if that is unknown."""
    rooms = [sys.maxsize]
    with contextlib.suppress(OSError, ValueError, KeyError):
        rooms.append(1024 * _numbers("/proc/meminfo")["MemAvailable:"])
    with contextlib.suppress(OSError, ValueError, KeyError):  # without a limit, the file contains "max"
        reclaimable = _numbers(_CGROUP / "memory.stat")["inactive_file"]
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        rooms.append(max(limit - used + reclaimable, 0))
    return min(rooms)


def _numbers(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the number of each line of a file by the word in front of it."""
    lines = (line.split() for line in Path(path).read_text(encoding="ascii").splitlines())
    return {words[0]: int(words[1]) for words in lines}


def retire_memory(directory: Path, *, has_copies: bool = False) -> None:
    """Remove the checkpoints in memory that belong to `directory`; copy the newest to the disk if it is newer.

    A checkpoint whose weights are not finite is not copied. If the disk refuses the copy, all stay, with a warning.

    Args:
        directory: The folder of checkpoints on disk.
        has_copies: Whether other nodes may still have copies. Then `directory` keeps the name of the folder in memory,
            so that the next start finds and removes the copies.
    """
    folder = memory_folder(directory)
    if folder is None:
        return
    steps = [each.record.step for each in list_checkpoints(directory) if each.record and not missing_file(each.record)]
    records = [each.record for each in list_checkpoints(folder) if each.record is not None]
    newer = [each for each in records if each.step > max(steps, default=-1) and each.finite_weights is not False]
    try:
        for record in newer[-1:]:
            copy_checkpoint(record, directory)
    except BrokenCheckpointError as error:
        log.warning("The newest checkpoint in memory is lost: %s", error)
    except (CheckpointError, OSError) as error:
        log.warning(
            "The newest checkpoint in memory could not be copied to the disk and stays in %s: %s", folder, error
        )
        return
    discard_memory(directory, has_copies=has_copies)


def discard_memory(directory: Path, *, has_copies: bool = False) -> None:
    """Remove the checkpoints in memory that belong to `directory`; see `retire_memory` for `has_copies`."""
    folder = memory_folder(directory)
    try:
        if folder is not None:
            for listed in list_checkpoints(folder):
                delete_checkpoint(listed.path)
            shutil.rmtree(folder)
        if not has_copies:
            (directory / POINTER).unlink(missing_ok=True)
    except (CheckpointError, OSError) as error:
        log.warning("Could not remove the checkpoints in memory: %s", error)
