"""Files by which the ranks of a run inform each other: that they live, why they failed, how rank zero ended.

What breaks on one rank is seen by the others as a connection that closed, or as a collective that never ends. A rank
that fails therefore leaves a record, and rank zero reports the oldest one. A rank holds a lock while it lives. Rank
zero leaves its exit code, with which the others end too: launchers look at the code of every process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from ....callbacks.stop.sources import process_age_s
from ...contract.exceptions import FailureCategory, StopReason
from ...plumbing.durable import write_bytes_durably
from ...plumbing.failures import EXIT_STOPPED, Failure
from ...plumbing.file_lock import FileLock, holding_process, is_held
from ...plumbing.safe_open import PRIVATE_FILE, make_directory, read_own

__all__ = ["FOLDER", "LAUNCH_ID", "RankFiles", "host_name"]

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger(__name__)

FOLDER = ".ranks"
EXIT_FILE = ".rank-zero-exit"
"""Not ``.json``: of a fit the folder is that of its checkpoints, where it would be looked at as a record."""
LAUNCH_ID = "GENLIGHT_LAUNCH_ID"
"""Where nothing else tells one launch from the next, what starts the ranks sets this, alike for all."""
LAUNCH = (LAUNCH_ID, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
"""Variables that tell one launch from the next; none is set where rank zero starts the others."""
RESTART = "TORCHELASTIC_RESTART_COUNT"
"""So does this one among processes of one agent of torchrun; an agent that came later has counted fewer restarts."""
LAUNCHED_WITHIN_S = 10.0
"""How much sooner than rank zero another rank of the same launch may have begun, and failed."""
LONGEST_BYTES = 1 << 20

ExitCode = Annotated[int, msgspec.Meta(ge=0, le=255)]


class FailureRecord(msgspec.Struct, frozen=True):
    """Why a rank failed."""

    category: FailureCategory | StopReason
    text: str
    resumable: bool
    exit_code: ExitCode
    rank: Annotated[int, msgspec.Meta(ge=0)]
    at_s: float
    """Seconds since 1970."""
    launch: str
    restart: str = ""

    @property
    def failure(self) -> Failure:
        """The failure as rank zero reports it."""
        text = self.text if self.exit_code == EXIT_STOPPED else f"{self.text} (rank {self.rank})"
        return Failure(self.category, text, self.resumable, self.exit_code)


class ExitRecord(msgspec.Struct, frozen=True):
    """How rank zero ended."""

    exit_code: ExitCode
    launch: str
    at_s: float


class RankFiles:
    """The files of one launch. Where ranks share no folder, a failure is only seen by the connection that it closes.

    Args:
        artifacts_dir: The run's folder.
        began_s: When this process began, in seconds since 1970; None asks the system. Records of an attempt that was
            killed before do not count.
    """

    def __init__(self, artifacts_dir: Path, *, began_s: float | None = None) -> None:
        self.folder = artifacts_dir / FOLDER
        self._exit_file = artifacts_dir / EXIT_FILE
        self._began_s = time.time() - process_age_s() if began_s is None else began_s
        self._seen: set[Path] = set()
        self._processes: dict[int, int] = {}
        self._ignored: set[Path] = set()

    # failures

    def leave(self, rank: int, failure: Failure) -> None:
        """Record why this rank failed."""
        make_directory(self.folder)
        record = FailureRecord(
            **dataclasses.asdict(failure), rank=rank, at_s=time.time(), launch=_launch(), restart=_restart()
        )
        write_bytes_durably(self.folder / f"rank-{rank}.json", msgspec.json.encode(record), mode=PRIVATE_FILE)

    def failures(self) -> list[FailureRecord]:
        """The failures that ranks of this launch recorded, the oldest first."""
        records = filter(None, (self._read(path, FailureRecord) for path in self.folder.glob("rank-*.json")))
        return sorted((record for record in records if self._is_of_this_launch(record)), key=lambda record: record.at_s)

    def _is_of_this_launch(self, record: FailureRecord) -> bool:
        is_certain = record.launch and record.restart == _restart()
        return record.launch == _launch() and record.at_s >= self._began_s - (LAUNCHED_WITHIN_S if is_certain else 0.0)

    def stop_reason(self) -> str | None:
        """Why another rank was asked to stop before the ranks had met; None while none was."""
        first = next(iter(self.failures()), None) if self.folder.exists() else None
        return first.category if first is not None and first.exit_code == EXIT_STOPPED else None

    # presence

    @contextlib.contextmanager
    def present(self, rank: int) -> Iterator[None]:
        """Hold the lock of this rank; a block that is left in any way but by the end of the process removes it."""
        path = self.folder / f"rank-{rank}.lock"
        try:
            make_directory(path.parent)
            lock = FileLock(path)
        except OSError as error:
            log.debug("rank zero could not name this rank if it died: %s", error)
            yield
            return
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, host_name().encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            lock.release()

    def remember_who_is_present(self) -> None:
        """Remember which locks are held: one that never was proves nothing, as some file systems show none."""
        held = [path for path in self.folder.glob("rank-*.lock") if is_held(path)]
        self._seen |= set(held)
        here = {_rank_of(path): holding_process(path) for path in held}
        self._processes = {rank: process for rank, process in here.items() if process is not None}

    def processes(self) -> dict[int, int]:
        """The process ids of the ranks that were seen last on this machine, by rank."""
        return self._processes

    def lost(self) -> dict[int, str]:
        """The hosts of the ranks that ended without removing their lock, by rank, without those that left a record."""
        noted = {record.rank for record in self.failures()}
        gone = {_rank_of(path): path for path in sorted(self._seen) if _is_abandoned(path)}
        return {rank: _host_in(path) for rank, path in gone.items() if rank not in noted}

    def name_others(self) -> bool:
        """Whether other ranks left anything here."""
        return any(self.folder.glob("rank-*"))

    # the end

    def leave_exit_code(self, exit_code: int) -> None:
        """Leave the exit code of rank zero for the other ranks; without it, to them it was killed."""
        try:
            record = msgspec.json.encode(ExitRecord(exit_code, _launch(), time.time()))
            write_bytes_durably(self._exit_file, record, mode=PRIVATE_FILE)
        except OSError as error:
            log.warning("the end of the run could not be reported to the other ranks: %s", error)

    def exit_code(self) -> int | None:
        """The exit code that rank zero left since this process began; None where it left none."""
        record = self._read(self._exit_file, ExitRecord)
        is_of_this_launch = record is not None and record.launch == _launch() and record.at_s >= self._began_s
        return record.exit_code if record is not None and is_of_this_launch else None

    def clear(self) -> None:
        """Remove all files but the exit code; a folder that holds anything else stays."""
        for path in self.folder.glob("rank-*"):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """A record; None, with a warning, for what no rank of ours can have written."""
        try:
            return msgspec.json.decode(read_own(path, limit=LONGEST_BYTES), type=kind)
        except FileNotFoundError:  # cleared meanwhile
            return None
        except (OSError, ValueError, RecursionError) as error:
            if path not in self._ignored:
                self._ignored.add(path)
                log.warning("%s is ignored: %s", path, error.strerror if isinstance(error, OSError) else error)
            return None


def host_name() -> str:
    """The name of this node, as its scheduler calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _launch() -> str:
    """An identifier that ranks of one launch share, and no two launches; empty where rank zero starts the others."""
    return " ".join(f"{name}={os.environ[name]}" for name in LAUNCH if name in os.environ)


def _restart() -> str:
    return os.environ.get(RESTART, "")


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _is_abandoned(path: Path) -> bool:
    return path.exists() and not is_held(path)


def _host_in(path: Path) -> str:
    try:
        return read_own(path, limit=LONGEST_BYTES).decode(errors="replace")
    except OSError:
        return "an unknown host"
