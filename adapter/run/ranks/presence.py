"""Which ranks of another launcher have gone without a word: each holds a lock in the run's folder while it lives."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from ...plumbing.file_lock import FileLock, is_held
from ...plumbing.safe_open import make_directory, read_own

__all__ = ["Presence", "present"]

log = logging.getLogger(__name__)

FOLDER = ".ranks-present"
LONGEST_HOST_BYTES = 1024


@contextlib.contextmanager
def present(artifacts_dir: Path, rank: int) -> Iterator[None]:
    """Show rank zero that this rank lives; a block that is left in any way but by the end of the process ends that."""
    path = artifacts_dir / FOLDER / f"rank-{rank}"
    try:
        make_directory(path.parent)
        lock = FileLock(path)
    except OSError as error:
        log.debug("rank zero could not name this rank if it died: %s", error)
        yield
        return
    os.ftruncate(lock.descriptor, 0)
    os.pwrite(lock.descriptor, (os.environ.get("SLURMD_NODENAME") or socket.gethostname()).encode(), 0)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


class Presence:
    """The other ranks, as rank zero sees them.

    A lock that was never seen held proves nothing, since some file systems do not show those of other machines.

    Args:
        artifacts_dir: The run's folder.
    """

    def __init__(self, artifacts_dir: Path) -> None:
        self.folder = artifacts_dir / FOLDER
        self._seen: set[Path] = set()

    def look(self) -> None:
        """Remember who is there."""
        self._seen |= {path for path in self.folder.glob("rank-*") if is_held(path)}

    def lost(self) -> dict[int, str]:
        """The hosts of the ranks that were there and are not, though they did not leave, by rank."""
        gone = [path for path in self._seen if path.exists() and not is_held(path)]
        return {int(path.name.removeprefix("rank-")): _host_in(path) for path in sorted(gone)}


def _host_in(path: Path) -> str:
    try:
        return read_own(path, limit=LONGEST_HOST_BYTES).decode(errors="replace")
    except OSError:
        return "an unknown host"
