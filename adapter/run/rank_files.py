"""The files by which the ranks of a run inform each other.

If something breaks on one rank, the others see a closed connection or a collective that never ends. A failing rank
therefore leaves a record, and rank zero reports the oldest one. Every other rank holds a lock while it lives, so that
rank zero sees the death of a killed one, which leaves no record. Rank zero leaves its exit code, and the others exit
with the same code, because launchers check the code of every process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...callbacks.stop.sources import process_age_s
from ..cluster.job_context import host_name
from ..contract.exceptions import FailureCategory, StopReason
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.failures import EXIT_STOPPED, Failure
from ..plumbing.file_lock import FileLock, holding_process, is_held
from ..plumbing.safe_open import PRIVATE_FILE, read_own
from .folder import TRIES

log = logging.getLogger(__name__)

FOLDER = ".ranks"
EXIT_FILE = ".rank-zero-exit"
"""File with the exit code of rank zero. Not ``.json``: in a fit it lies in the folder of the checkpoint records."""
LAUNCH_ID = "GENLIGHT_LAUNCH_ID"
"""Variable with the same value in all ranks of one launch, set by launchers that have no other identifier (`ray.py`,
`restarts.py`)."""
LAUNCH = (LAUNCH_ID, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
"""Variables that distinguish one launch from the next; none is set if rank zero starts the others."""
RESTART = "TORCHELASTIC_RESTART_COUNT"
"""Number of restarts by this agent of torchrun; agents that joined later have a smaller number."""
LAUNCHED_WITHIN_S = 10.0
"""Another rank of the same launch may have started, and failed, up to this many seconds before rank zero started."""
LONGEST_BYTES = 1 << 20


class EndRecord(msgspec.Struct, frozen=True):
    """How a rank ended. Rank zero leaves only its exit code, another rank its failure."""

    rank: Annotated[int, msgspec.Meta(ge=0)]
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    at_s: float
    """Seconds since 1970."""
    launch: str
    restart: str = ""
    category: FailureCategory | StopReason = "train-step"
    text: str = ""
    resumable: bool = False

    @property
    def failure(self) -> Failure:
        """Failure as rank zero reports it."""
        text = self.text if self.exit_code == EXIT_STOPPED else f"{self.text} (rank {self.rank})"
        return Failure(self.category, text, self.resumable, self.exit_code)


class RankFiles:
    """The files of one launch. Without a common folder, ranks notice a failure only because a connection closes.

    Args:
        artifacts_dir: The run's folder.
        began_s: When this process started, in seconds since 1970; None asks the system. Older records do not count:
            an earlier attempt that was killed left them.
    """

    def __init__(self, artifacts_dir: Path, *, began_s: float | None = None) -> None:
        self.folder = artifacts_dir / FOLDER
        self.processes: dict[int, int] = {}
        """Process ids, by rank, of the ranks on this machine that `scan_locks` has seen."""
        self._exit_file = artifacts_dir / EXIT_FILE
        self._began_s = time.time() - process_age_s() if began_s is None else began_s
        self._present = set[Path]()
        """Locks that `scan_locks` has seen held."""
        self._ignored = set[Path]()
        """Unreadable records, for each of which one warning was logged."""
        self.has_exited = False
        """Whether `await_exit` has seen a process end; `lost` then tells whether that was a loss."""
        self._exits = select.poll()

    # Failures

    def record(self, rank: int, failure: Failure) -> None:
        """Record why this rank failed."""
        make_directory(self.folder)
        _write(self.folder / f"rank-{rank}.json", rank, **dataclasses.asdict(failure))

    def failures(self, *, before_s: float = float("inf")) -> list[EndRecord]:
        """Return the failures that ranks of this launch recorded before a time, the oldest first."""
        records = filter(None, map(self._read, self.folder.glob("rank-*.json")))
        ours = [record for record in records if self._is_of_this_launch(record) and record.at_s < before_s]
        return sorted(ours, key=lambda record: record.at_s)

    def _is_of_this_launch(self, record: EndRecord) -> bool:
        is_certain = record.launch and record.restart == _restart()
        return record.launch == _launch() and record.at_s >= self._began_s - (LAUNCHED_WITHIN_S if is_certain else 0.0)

    def stop_reason(self) -> str | None:
        """Return why another rank was stopped before the ranks had met; None if none was."""
        first = next(iter(self.failures()), None) if self.folder.exists() else None
        return first.category if first is not None and first.exit_code == EXIT_STOPPED else None

    # Presence

    @contextlib.contextmanager
    def present(self, rank: int) -> Iterator[None]:
        """Hold the lock of this rank. Leaving the block removes it; a killed process leaves it behind."""
        path = self.folder / f"rank-{rank}.lock"
        try:
            make_directory(path.parent)
            lock = FileLock(path, tries=TRIES)  # rank zero may hold it for a moment to test it
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

    def scan_locks(self) -> None:
        """Note which locks are held. Some file systems show none, so only a lock seen here can show a death later."""
        for path in set(self.folder.glob("rank-*.lock")) - self._present:
            if is_held(path):
                self._present.add(path)
                if (process := holding_process(path)) is not None:
                    self.processes[_rank_of(path)] = process
                    with contextlib.suppress(OSError):  # this system cannot report its exit, or it has ended
                        self._exits.register(os.pidfd_open(process), select.POLLIN)

    def await_exit(self, seconds: float) -> None:
        """Wait `seconds`, or until a process of this machine that `scan_locks` has seen ends."""
        for descriptor, _ in self._exits.poll(seconds * 1000):
            self.has_exited = True
            self._exits.unregister(descriptor)
            os.close(descriptor)

    def lost(self) -> dict[int, str]:
        """Return the hosts, by rank, of ranks that left behind their lock and no record: they were killed."""
        recorded = {record.rank for record in self.failures()}
        gone = [path for path in sorted(self._present) if path.exists() and not is_held(path)]
        return {_rank_of(path): _host_in(path) for path in gone if _rank_of(path) not in recorded}

    # The end

    def leave_exit_code(self, exit_code: int) -> None:
        """Leave the exit code of rank zero for the other ranks. Without it they assume that it was killed."""
        try:
            _write(self._exit_file, 0, exit_code=exit_code)
        except OSError as error:
            log.warning("the end of the run could not be reported to the other ranks: %s", error)

    def exit_code(self) -> int | None:
        """Return the exit code that rank zero left since this process started; None if it left none."""
        record = self._read(self._exit_file)
        is_of_this_launch = record is not None and record.launch == _launch() and record.at_s >= self._began_s
        return record.exit_code if record is not None and is_of_this_launch else None

    def clear(self) -> None:
        """Remove all files except the exit code, then the folder if it is empty."""
        for path in self.folder.glob("rank-*"):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _read(self, path: Path) -> EndRecord | None:
        """Read a record. If none of our ranks can have written it, warn and return None."""
        try:
            return msgspec.json.decode(read_own(path, limit=LONGEST_BYTES), type=EndRecord)
        except FileNotFoundError:  # cleared meanwhile
            return None
        except (OSError, ValueError, RecursionError) as error:
            if path not in self._ignored:
                self._ignored.add(path)
                log.warning("%s is ignored: %s", path, error.strerror if isinstance(error, OSError) else error)
            return None


def _write(path: Path, rank: int, **end: Any) -> None:
    record = EndRecord(rank=rank, at_s=time.time(), launch=_launch(), restart=_restart(), **end)
    write_bytes_durably(path, msgspec.json.encode(record), mode=PRIVATE_FILE)


def _launch() -> str:
    """Return an identifier of this launch, equal on all its ranks; empty if rank zero starts the others."""
    return " ".join(f"{name}={os.environ[name]}" for name in LAUNCH if name in os.environ)


def _restart() -> str:
    return os.environ.get(RESTART, "")


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("rank-"))


def _host_in(path: Path) -> str:
    try:
        return read_own(path, limit=LONGEST_BYTES).decode(errors="replace")
    except OSError:
        return "an unknown host"
