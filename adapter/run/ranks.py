"""The other ranks of a run: files by which they inform each other, and one thread that checks these files.

If something breaks on one rank, the others see a closed connection or a collective that never ends. A failing rank
therefore leaves a record, and rank zero reports the oldest one. A rank holds a lock while it lives. Rank zero leaves
its exit code, and the others exit with the same code, because launchers check the code of every process.

This rank may wait for the others in a collective for half an hour. Meanwhile the thread runs a list of checks. If one
returns an exception, the watch passes it to the attempt, which names the rank and ends within a bounded time:

=================================  ====================================================  ===================
check                              finds                                                 runs on
=================================  ====================================================  ===================
`failed_ranks`                     a record of a failure; a rank that was killed         rank zero, each node
`paused_ranks`                     a stop that a paused process does not answer          all
`stopped_before_meeting`           a stop before all ranks have joined                   all
`warn_of_absent_ranks`             nothing; warns that not all ranks have joined         all
`RankZero.check`                   the end of rank zero                                  all but zero
=================================  ====================================================  ===================
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...callbacks.stop.sources import StopSources, process_age_s
from ..cluster.job_context import in_srun_task
from ..contract.exceptions import FailureCategory, RankFailedError, StopReason, TrainingCanceled
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from ..plumbing.file_lock import FileLock, holding_process, is_held
from ..plumbing.safe_open import PRIVATE_FILE, open_own, read_own
from ..plumbing.threads import started
from .folder import LOCK_NAME, TRIES
from .this_rank import host_name

if TYPE_CHECKING:
    import lightning.pytorch as pl


log = logging.getLogger(__name__)

FOLDER = ".ranks"
EXIT_FILE = ".rank-zero-exit"
"""Not ``.json``: a fit puts it into its checkpoint folder, and a ``.json`` file there would be taken for a record."""
LAUNCH_ID = "GENLIGHT_LAUNCH_ID"
"""Launchers that set no other identifier give all ranks of one launch the same value of this variable."""
LAUNCH = (LAUNCH_ID, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
"""Variables that distinguish one launch from the next; none is set if rank zero starts the others."""
RESTART = "TORCHELASTIC_RESTART_COUNT"
"""Distinguishes restarts by one agent of torchrun; an agent that came later has counted fewer restarts."""
LAUNCHED_WITHIN_S = 10.0
"""How much sooner than rank zero another rank of the same launch may have started, and failed."""
LONGEST_BYTES = 1 << 20


class EndRecord(msgspec.Struct, frozen=True):
    """How a rank ended: only the exit code for rank zero, the failure for another rank."""

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
    """The files of one launch. Ranks that share no folder notice a failure only by the connection that it closes.

    Args:
        artifacts_dir: The run's folder.
        began_s: When this process started, in seconds since 1970; None asks the system. Records of an earlier attempt
            that was killed do not count.
    """

    def __init__(self, artifacts_dir: Path, *, began_s: float | None = None) -> None:
        self.folder = artifacts_dir / FOLDER
        self.processes: dict[int, int] = {}
        """Process ids, by rank, of the ranks on this machine that `scan_locks` has seen."""
        self._exit_file = artifacts_dir / EXIT_FILE
        self._began_s = time.time() - process_age_s() if began_s is None else began_s
        self._present = set[Path]()
        self._ignored = set[Path]()

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
        """Return the reason of a stop request to another rank before the ranks had met; None without one."""
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
        """Note which locks are held. A lock that was never held proves nothing: some file systems show none."""
        for path in set(self.folder.glob("rank-*.lock")) - self._present:
            if is_held(path):
                self._present.add(path)
                if (process := holding_process(path)) is not None:
                    self.processes[_rank_of(path)] = process

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


# The watch

Check = Callable[[], Exception | None]

POLL_S = 0.1
"""Seconds between two rounds of checks."""
SCAN_LOCKS_EVERY_S = 1.0
"""Seconds between two scans of the locks; testing the lock of another machine uses the network."""
HEARD_WITHIN_S = 2.0
"""How long a failing rank zero waits for the record of an earlier failure elsewhere."""
WAITS_SILENTLY_S = 10.0
"""How long a rank waits for the others to join before it warns."""
MEETING_PATIENCE_S = 2.0
"""How long after a stop request the others may still join, so that all end in the usual way."""
PAUSE_PATIENCE_S = 15.0
"""How long after a stop request a process may stay paused, for example by a debugger."""
RANK_ZERO_PATIENCE_S = 5.0
"""How long another rank may take to end by itself after rank zero has ended."""
_RANK_ZERO_PROCESS = "GENLIGHT_RANK_ZERO_PID"


class FailedElsewhere(RankFailedError):
    """Another rank failed. `failure` is the failure to report."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text.removeprefix(f"{failure.category}:"))
        self.failure = failure


class RankWatch:
    """A thread that runs checks; it starts with the first check.

    Args:
        end: Called in that thread with the exception of a check; ends the process.
    """

    def __init__(self, end: Callable[[Exception], None]) -> None:
        self._end = end
        self._checks: list[Check] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def looking(self, *checks: Check) -> Iterator[None]:
        """Also run `checks` during a block."""
        self._checks += checks
        if self._thread is None and checks:
            self._thread = threading.Thread(target=self._poll, name="genlight-ranks", daemon=True)
            started(self._thread)
        try:
            yield
        finally:
            for check in checks:
                self._checks.remove(check)

    def close(self) -> None:
        """Run no more checks."""
        self._closed.set()

    def _poll(self) -> None:
        while not self._closed.wait(POLL_S):
            for check in tuple(self._checks):
                error = check()
                if error is not None and check in self._checks and not self._closed.is_set():
                    self._end(error)
                    return


class RankProcesses:
    """The processes of other ranks that Lightning started from this one; none if another launcher starts them.

    Lightning's own observer kills all processes, including this one, up to five seconds after one has died. That may
    be before the run has reported it. `failed` therefore disables the observer; a `RankWatch` sees a death sooner.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return getattr(self._trainer.strategy.launcher, "procs", [])

    def failed(self) -> tuple[int, int] | None:
        """Return the first rank whose exit code is not 0, and that code (negative for a signal)."""
        for thread in threading.enumerate() if self._processes() else ():
            if thread.name == "child-process-observer":
                thread._child_processes = []  # type: ignore[attr-defined]  # an observer without children ends
        first = self._trainer.global_rank + 1
        codes = ((rank, process.poll()) for rank, process in enumerate(self._processes(), start=first))
        return next(((rank, code) for rank, code in codes if code), None)

    def kill(self) -> None:
        """Kill them: a rank that hangs in a collective reacts to nothing else. Takes no lock, for signal handlers."""
        for process in self._processes():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


class RankZero:
    """Rank zero as seen by another rank, through its lock on the run's folder or as the parent process.

    If a rank never sees either, because the file system does not show locks of other machines or because rank zero
    never took its lock, the launcher has to end that rank.

    Args:
        artifacts_dir: The run's folder.
        files: The files with its exit code.
    """

    def __init__(self, artifacts_dir: Path, files: RankFiles) -> None:
        self.files = files
        self.check = after_patience(RANK_ZERO_PATIENCE_S, self._end)
        """Returns an error once it has ended in any way."""
        self._lock = artifacts_dir / LOCK_NAME
        starter = os.environ.get(_RANK_ZERO_PROCESS)
        self._parent = None if starter is None else int(starter)
        self._was_locked = self._is_gone = False
        self._unlocked: tuple[int, int, int] | None = None
        """`_stamp` of the lock file when nobody held the lock."""

    @staticmethod
    @contextlib.contextmanager
    def announce() -> Iterator[None]:
        """During a block, let the ranks that this process starts know that it is rank zero."""
        os.environ[_RANK_ZERO_PROCESS] = str(os.getpid())
        try:
            yield
        finally:
            del os.environ[_RANK_ZERO_PROCESS]

    def processes(self) -> dict[int, int]:
        """Return its process id by its rank; empty if it runs on another machine."""
        process = self._parent or holding_process(self._lock)
        return {} if process is None else {0: process}

    def is_gone(self) -> bool | None:
        """Return whether it has ended; None if this rank cannot know."""
        if self._is_gone:  # If the lock is held again, it belongs to the next attempt.
            return True
        # The holder writes into the lock file, so first check whether the file has changed. Testing the lock takes it
        # for a moment; with many ranks doing that all the time, rank zero might never get it.
        stamp = _stamp(self._lock)
        is_locked = (self._was_locked or stamp != self._unlocked) and is_held(self._lock)
        has_exited = self._parent is not None and os.getppid() != self._parent
        self._is_gone = has_exited or (self._was_locked and not is_locked)
        self._was_locked, self._unlocked = is_locked, None if is_locked else stamp
        return True if self._is_gone else False if is_locked or self._parent is not None else None

    def _end(self) -> Exception | None:
        return RankFailedError("rank 0 has ended, so this rank ends as well") if self.is_gone() else None

    def wait_for_end(self, *, within_s: float, is_bounded: bool = False) -> int | None:
        """Wait until it has ended: a launcher that sees another rank exit with an error may kill it too early.

        Args:
            within_s: How long to wait for its exit code if this rank cannot see its end.
            is_bounded: Whether this limit, and the exit code, also end the wait if this rank can see its end.

        Returns:
            Its exit code; None if it left none.
        """
        end = time.monotonic() + within_s
        while not (gone := self.is_gone()):
            if (is_bounded or gone is None) and (self.files.exit_code() is not None or time.monotonic() >= end):
                break
            time.sleep(POLL_S)
        return self.files.exit_code()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:  # open it, since a network file system may answer a plain `stat` from its cache
        descriptor = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    status = os.fstat(descriptor)
    os.close(descriptor)
    return status.st_ino, status.st_mtime_ns, status.st_size


def agent_check() -> Callable[[], StopReason | None]:
    """Return a check for `StopSources.add_check` that stops a rank after its torchrun agent was killed.

    Otherwise it would train on unsupervised, and keep a new launcher out of the run's folder.
    """
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return lambda: "preempted" if agent is not None and os.getppid() != agent else None


def after_patience(seconds: float, check: Check) -> Check:
    """Return `check` with a delay: its error counts once it has persisted for `seconds`."""
    since: float | None = None

    def patient() -> Exception | None:
        nonlocal since
        error = check()
        if error is None:
            since = None
            return None
        now = time.monotonic()
        since = now if since is None else since
        return error if now - since >= seconds else None

    return patient


def failed_ranks(files: RankFiles | None, processes: RankProcesses) -> Check:
    """Return a check for the oldest recorded failure, and for ranks that were killed or whose node was lost.

    Args:
        files: The files of all ranks on rank zero; None on other ranks.
        processes: The processes that this rank started.
    """
    scan_at, lost = 0.0, None

    def check() -> Exception | None:
        nonlocal scan_at, lost
        failure = _recorded_failure(files, processes) or lost
        if failure is not None:
            stopped = failure.exit_code == EXIT_STOPPED
            return TrainingCanceled(failure.category) if stopped else FailedElsewhere(failure)
        if files is not None and time.monotonic() >= scan_at:
            if have_met():  # scan at once: the death of a rank is visible only if its lock was seen before
                files.scan_locks()
                scan_at = time.monotonic() + SCAN_LOCKS_EVERY_S
            lost = _lost_rank(files)  # counts in the next round: its process or its record may say more by then
        return None

    return check


def first_cause(own: Failure, at_s: float, files: RankFiles, processes: RankProcesses | None) -> Failure:
    """Return the failure to report after rank zero failed with `own` at `at_s` (seconds since 1970).

    It is an older failure of another rank if there is one within `HEARD_WITHIN_S`, otherwise `own`.
    """
    end = time.monotonic() + HEARD_WITHIN_S
    other, lost = None, _lost_rank(files)
    while other is None and time.monotonic() < end:
        time.sleep(POLL_S)
        other = _recorded_failure(files, processes, before_s=at_s) or lost
        lost = lost or _lost_rank(files)
    return own if other is None else dataclasses.replace(other, resumable=own.resumable)


def _recorded_failure(
    files: RankFiles | None, processes: RankProcesses | None, *, before_s: float = float("inf")
) -> Failure | None:
    """Return the oldest recorded failure; without one, the failure of a process that died without a record."""
    for record in () if files is None else files.failures(before_s=before_s):
        return record.failure
    dead = None if processes is None else processes.failed()
    if dead is None:
        return None
    rank, code = dead
    return _failure(f"rank {rank} {f'was killed by signal {-code}' if code < 0 else f'ended with exit code {code}'}")


def _lost_rank(files: RankFiles) -> Failure | None:
    for rank, host in files.lost().items():
        return _failure(f"rank {rank} on {host} ended without a report: it was killed, or its node was lost")
    return None


def _failure(what: str) -> Failure:
    return Failure("train-step", f"train-step:RankFailedError: {what}", resumable=False, exit_code=EXIT_FAILED)


def paused_ranks(processes: Callable[[], Mapping[int, int]], stop: StopSources) -> Check:
    """Return a check for a process that stays paused after a stop request; the others wait for it in a collective.

    Args:
        processes: Returns the process id of each known rank on this machine.
        stop: The sources of stop requests.
    """

    def check() -> Exception | None:
        for rank, pid in processes().items() if stop.is_stopping() else ():
            if _is_paused(pid):
                within = f"did not answer the stop within {PAUSE_PATIENCE_S:g} s"
                return RankFailedError(f"rank {rank} (process {pid}) is paused and {within}")
        return None

    return after_patience(PAUSE_PATIENCE_S, check)


def kill_paused(processes: Mapping[int, int]) -> None:
    """Kill the paused processes among `processes`: nothing else ends them, and their launcher waits for them."""
    for rank, pid in processes.items():
        if _is_paused(pid):
            log.warning("killing rank %d (process %d), which is paused although the run has ended", rank, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def stopped_before_meeting(stop: StopSources) -> Check:
    """Return a check for a stop request before all ranks have joined. It ends this rank without the others.

    While a rank waits for the others, no Python signal handler runs: if a node never joins, this rank would wait for
    half an hour and react only to a second signal.
    """

    def check() -> Exception | None:
        reason = None if have_met() else stop.reason()
        return None if reason is None else TrainingCanceled(reason)

    return after_patience(MEETING_PATIENCE_S, check)


def warn_of_absent_ranks(rank: int, ranks: int) -> Check:
    """Return a check that finds nothing, but warns once that this rank still waits for the others to join."""
    began_at: float | None = time.monotonic()

    def check() -> Exception | None:
        nonlocal began_at
        if began_at is None or have_met():
            began_at = None
        elif time.monotonic() - began_at >= WAITS_SILENTLY_S:
            began_at = None
            hint = "; inside of `srun --pty` start it with srun again, or set `lightning.devices`" * in_srun_task()
            text = "rank %d has waited %g s for the other ranks: all %d must be started and able to connect%s"
            log.warning(text, rank, WAITS_SILENTLY_S, ranks, hint)
        return None

    return check


def have_met() -> bool:
    """Return whether all ranks have joined the process group."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _is_paused(pid: int) -> bool:
    """Return whether a process of this machine is stopped (``SIGSTOP``, a debugger); False if that is unknown."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] in ("T", "t")
