"""The other ranks of a run: files by which they inform each other, and one thread that looks at them.

What breaks on one rank is seen by the others as a connection that closed, or as a collective that never ends. A rank
that fails therefore leaves a record, and rank zero reports the oldest one. A rank holds a lock while it lives. Rank
zero leaves its exit code, with which the others end too: launchers look at the code of every process.

The thread looks while this rank may wait for the others in a collective for half an hour. What it looks for is a list
of checks. Each returns an exception once it has found something, and the watch hands that to the attempt, which names
the rank and ends within a bounded time:

=================================  ====================================================  ===============
check                              finds                                                 looks on
=================================  ====================================================  ===============
`failed_ranks`                     a record of a failure; a rank that was killed         rank zero, each node
`paused_ranks`                     a stop that a paused process does not answer          all
`stopped_before_meeting`           a stop while not all ranks have come                  all
`told_to_wait`                     nothing; says that not all ranks have come            all
`RankZero.check`                   the end of rank zero                                  all but zero
=================================  ====================================================  ===============
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

__all__ = [
    "FOLDER",
    "LAUNCH_ID",
    "LOOK_EVERY_S",
    "Check",
    "FailedElsewhere",
    "RankFiles",
    "RankProcesses",
    "RankWatch",
    "RankZero",
    "agent_check",
    "failed_ranks",
    "first_cause",
    "kill_paused",
    "lasting",
    "paused_ranks",
    "stopped_before_meeting",
    "told_to_wait",
]

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


class EndRecord(msgspec.Struct, frozen=True):
    """How a rank ended: of rank zero its exit code alone, of another one why it failed."""

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
        """The failure as rank zero reports it."""
        text = self.text if self.exit_code == EXIT_STOPPED else f"{self.text} (rank {self.rank})"
        return Failure(self.category, text, self.resumable, self.exit_code)


class RankFiles:
    """The files of one launch. Where ranks share no folder, a failure is only seen by the connection that it closes.

    Args:
        artifacts_dir: The run's folder.
        began_s: When this process began, in seconds since 1970; None asks the system. Records of an attempt that was
            killed before do not count.
    """

    def __init__(self, artifacts_dir: Path, *, began_s: float | None = None) -> None:
        self.folder = artifacts_dir / FOLDER
        self.processes: dict[int, int] = {}
        """The process ids of the ranks on this machine that `look` has found, by rank."""
        self._exit_file = artifacts_dir / EXIT_FILE
        self._began_s = time.time() - process_age_s() if began_s is None else began_s
        self._present = set[Path]()
        self._ignored = set[Path]()

    # failures

    def leave(self, rank: int, failure: Failure) -> None:
        """Record why this rank failed."""
        make_directory(self.folder)
        _write(self.folder / f"rank-{rank}.json", rank, **dataclasses.asdict(failure))

    def failures(self, *, before_s: float = float("inf")) -> list[EndRecord]:
        """The failures that ranks of this launch recorded before a time, the oldest first."""
        records = filter(None, map(self._read, self.folder.glob("rank-*.json")))
        ours = [record for record in records if self._is_of_this_launch(record) and record.at_s < before_s]
        return sorted(ours, key=lambda record: record.at_s)

    def _is_of_this_launch(self, record: EndRecord) -> bool:
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
            lock = FileLock(path, tries=TRIES)  # rank zero may be looking
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

    def look(self) -> None:
        """Note which locks are held: one that never was proves nothing, as some file systems show none."""
        for path in set(self.folder.glob("rank-*.lock")) - self._present:
            if is_held(path):
                self._present.add(path)
                if (process := holding_process(path)) is not None:
                    self.processes[_rank_of(path)] = process

    def lost(self) -> dict[int, str]:
        """The hosts of the ranks that ended without removing their lock, by rank, without those that left a record."""
        noted = {record.rank for record in self.failures()}
        gone = [path for path in sorted(self._present) if path.exists() and not is_held(path)]
        return {_rank_of(path): _host_in(path) for path in gone if _rank_of(path) not in noted}

    # the end

    def leave_exit_code(self, exit_code: int) -> None:
        """Leave the exit code of rank zero for the other ranks; without it, to them it was killed."""
        try:
            _write(self._exit_file, 0, exit_code=exit_code)
        except OSError as error:
            log.warning("the end of the run could not be reported to the other ranks: %s", error)

    def exit_code(self) -> int | None:
        """The exit code that rank zero left since this process began; None where it left none."""
        record = self._read(self._exit_file)
        is_of_this_launch = record is not None and record.launch == _launch() and record.at_s >= self._began_s
        return record.exit_code if record is not None and is_of_this_launch else None

    def clear(self) -> None:
        """Remove all files but the exit code; a folder that holds anything else stays."""
        for path in self.folder.glob("rank-*"):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _read(self, path: Path) -> EndRecord | None:
        """A record; None, with a warning, for what no rank of ours can have written."""
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
    """An identifier that ranks of one launch share, and no two launches; empty where rank zero starts the others."""
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


# the watch

Check = Callable[[], Exception | None]

LOOK_EVERY_S = 0.1
ASK_FOR_LOCKS_EVERY_S = 1.0
"""A lock of another machine is asked for over the network."""
HEARD_WITHIN_S = 2.0
"""How long rank zero, when it fails, waits to hear of a failure that came before its own."""
WAITS_SILENTLY_S = 10.0
"""How long a rank waits for the others to join before it says so."""
MEETING_PATIENCE_S = 2.0
"""How long after a stop was asked for the others may still come, so that all end in the usual way."""
PAUSE_PATIENCE_S = 15.0
"""How long after a stop was asked for a process may stay paused, as one is by a debugger or a suspended job."""
RANK_ZERO_PATIENCE_S = 5.0
"""How long after rank zero has ended another rank may need to end by itself."""
_RANK_ZERO_PROCESS = "GENLIGHT_RANK_ZERO_PID"


class FailedElsewhere(RankFailedError):
    """Another rank failed, which is reported as `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text.removeprefix(f"{failure.category}:"))
        self.failure = failure


class RankWatch:
    """The thread, which starts with the first check.

    Args:
        end: Takes what was found, in the watching thread; ends the process.
    """

    def __init__(self, end: Callable[[Exception], None]) -> None:
        self._end = end
        self._checks: list[Check] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def looking(self, *checks: Check) -> Iterator[None]:
        """Also run `checks`, for the length of a block."""
        self._checks += checks
        if self._thread is None and checks:
            self._thread = threading.Thread(target=self._look, name="genlight-ranks", daemon=True)
            started(self._thread)
        try:
            yield
        finally:
            for check in checks:
                self._checks.remove(check)

    def close(self) -> None:
        """Watch nothing from now on."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            for check in tuple(self._checks):
                found = check()
                if found is not None and check in self._checks and not self._closed.is_set():
                    self._end(found)
                    return


class RankProcesses:
    """The processes of other ranks that Lightning started from this one: none before, or where another launcher did.

    Lightning's own observer kills all processes, this one too, up to five seconds after one has died, which may be
    before the run has reported it. It is put to rest here: what has died is seen by a `RankWatch` sooner.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return getattr(self._trainer.strategy.launcher, "procs", [])

    def failed(self) -> tuple[int, int] | None:
        """The first rank whose process ended with another exit code than 0, and that code; below 0 a signal."""
        for thread in threading.enumerate() if self._processes() else ():
            if thread.name == "child-process-observer":
                thread._child_processes = []  # type: ignore[attr-defined]  # one without children ends
        first = self._trainer.global_rank + 1
        codes = ((rank, process.poll()) for rank, process in enumerate(self._processes(), start=first))
        return next(((rank, code) for rank, code in codes if code), None)

    def kill(self) -> None:
        """End them at once: one that hangs in a collective heeds nothing else. Takes no lock, for signal handlers."""
        for process in self._processes():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


class RankZero:
    """Rank zero, as another rank sees it: by the lock that it holds on the run's folder, or as its own parent.

    Where neither was ever seen, because the file system shows no locks of other machines or rank zero never came so
    far, the launcher has to end the rest.

    Args:
        artifacts_dir: The run's folder.
        files: Where it leaves its exit code.
    """

    def __init__(self, artifacts_dir: Path, files: RankFiles) -> None:
        self.files = files
        self.check = lasting(RANK_ZERO_PATIENCE_S, self._end)
        """Finds that it has ended, however it did."""
        self._lock = artifacts_dir / LOCK_NAME
        starter = os.environ.get(_RANK_ZERO_PROCESS)
        self._parent = None if starter is None else int(starter)
        self._was_locked = self._is_gone = False
        self._unlocked: tuple[int, int, int] | None = None
        """The file of the lock when nobody held it, as `_stamp` tells it."""

    @staticmethod
    @contextlib.contextmanager
    def announced() -> Iterator[None]:
        """Let the ranks that are started from this process meanwhile know that it is the first."""
        os.environ[_RANK_ZERO_PROCESS] = str(os.getpid())
        try:
            yield
        finally:
            del os.environ[_RANK_ZERO_PROCESS]

    def processes(self) -> dict[int, int]:
        """Its process id, by its rank; empty where it runs on another machine."""
        process = self._parent or holding_process(self._lock)
        return {} if process is None else {0: process}

    def is_gone(self) -> bool | None:
        """Whether it has ended; None if that cannot be seen."""
        if self._is_gone:  # A lock that is held once more belongs to the next attempt.
            return True
        # Who holds the lock writes into its file. A look at the lock itself takes it for a moment: those of many ranks
        # would keep rank zero from ever getting it.
        stamp = _stamp(self._lock)
        is_locked = (self._was_locked or stamp != self._unlocked) and is_held(self._lock)
        has_exited = self._parent is not None and os.getppid() != self._parent
        self._is_gone = has_exited or (self._was_locked and not is_locked)
        self._was_locked, self._unlocked = is_locked, None if is_locked else stamp
        return True if self._is_gone else False if is_locked or self._parent is not None else None

    def _end(self) -> Exception | None:
        return RankFailedError("rank 0 has ended, so this rank ends as well") if self.is_gone() else None

    def wait_for_end(self, *, within_s: float, is_bounded: bool = False) -> int | None:
        """Stay until it has ended, which a launcher that sees another rank leave with an error may end too early.

        Args:
            within_s: How long to wait for that code where its end cannot be seen.
            is_bounded: Whether to wait no longer, and not for more than the code, where it can be seen.

        Returns:
            Its exit code; None where it left none.
        """
        end = time.monotonic() + within_s
        while not (gone := self.is_gone()):
            if (is_bounded or gone is None) and (self.files.exit_code() is not None or time.monotonic() >= end):
                break
            time.sleep(LOOK_EVERY_S)
        return self.files.exit_code()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:  # opened, since a network file system may answer from what it knew some seconds ago
        descriptor = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    status = os.fstat(descriptor)
    os.close(descriptor)
    return status.st_ino, status.st_mtime_ns, status.st_size


def agent_check() -> Callable[[], StopReason | None]:
    """A check for `StopSources.add_check`: a rank whose agent of torchrun was killed saves and ends.

    Else it would train on with nobody to see it, and keep a new launcher out of the run's folder.
    """
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return lambda: "preempted" if agent is not None and os.getppid() != agent else None


def lasting(seconds: float, check: Check) -> Check:
    """`check`, whose finding counts once there has been one for `seconds`: it may pass, or end training by itself."""
    since: float | None = None

    def patient() -> Exception | None:
        nonlocal since
        found = check()
        if found is None:
            since = None
            return None
        now = time.monotonic()
        since = now if since is None else since
        return found if now - since >= seconds else None

    return patient


def failed_ranks(files: RankFiles | None, processes: RankProcesses) -> Check:
    """Finds the oldest failure that a rank noted, or a rank that was killed, or whose node was lost.

    Args:
        files: Of rank zero, those of all ranks; None elsewhere.
        processes: Those that this rank started.
    """
    ask_at, lost = 0.0, None

    def check() -> Exception | None:
        nonlocal ask_at, lost
        failure = _noted_failure(files, processes) or lost
        if failure is not None:
            stopped = failure.exit_code == EXIT_STOPPED
            return TrainingCanceled(failure.category) if stopped else FailedElsewhere(failure)
        if files is not None and time.monotonic() >= ask_at:
            if have_met():  # at once: that a rank has died is not seen where its lock never was
                files.look()
                ask_at = time.monotonic() + ASK_FOR_LOCKS_EVERY_S
            lost = _lost_rank(files)  # which counts next time: its process or its record says more
        return None

    return check


def first_cause(own: Failure, at_s: float, files: RankFiles, processes: RankProcesses | None) -> Failure:
    """The failure to report where rank zero failed with `own` at `at_s` (seconds since 1970): it, or an older one."""
    end = time.monotonic() + HEARD_WITHIN_S
    other, lost = None, _lost_rank(files)
    while other is None and time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
        other = _noted_failure(files, processes, before_s=at_s) or lost
        lost = lost or _lost_rank(files)
    return own if other is None else dataclasses.replace(other, resumable=own.resumable)


def _noted_failure(
    files: RankFiles | None, processes: RankProcesses | None, *, before_s: float = float("inf")
) -> Failure | None:
    """The oldest failure that a rank noted; of a process that died without a word where none did."""
    for record in () if files is None else files.failures(before_s=before_s):
        return record.failure
    dead = None if processes is None else processes.failed()
    if dead is None:
        return None
    rank, code = dead
    return _failure(f"rank {rank} {f'was killed by signal {-code}' if code < 0 else f'ended with exit code {code}'}")


def _lost_rank(files: RankFiles) -> Failure | None:
    for rank, host in files.lost().items():
        return _failure(f"rank {rank} on {host} ended without a word: it was killed, or its node was lost")
    return None


def _failure(what: str) -> Failure:
    return Failure("train-step", f"train-step:RankFailedError: {what}", resumable=False, exit_code=EXIT_FAILED)


def paused_ranks(processes: Callable[[], Mapping[int, int]], stop: StopSources) -> Check:
    """Finds a process that stays paused after a stop was asked for; the others wait for it in a collective.

    Args:
        processes: Gives the process id of each rank on this machine that can be looked at.
        stop: Says whether a stop was asked for.
    """

    def check() -> Exception | None:
        for rank, pid in processes().items() if stop.is_stopping() else ():
            if _is_paused(pid):
                within = f"did not answer the stop within {PAUSE_PATIENCE_S:g} s"
                return RankFailedError(f"rank {rank} (process {pid}) is paused and {within}")
        return None

    return lasting(PAUSE_PATIENCE_S, check)


def kill_paused(processes: Mapping[int, int]) -> None:
    """Kill the paused ones of `processes`, by rank: nothing else ends them, and their launcher waits for them."""
    for rank, pid in processes.items():
        if _is_paused(pid):
            log.warning("rank %d (process %d) is paused and is killed, since the run has ended", rank, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def stopped_before_meeting(stop: StopSources) -> Check:
    """Finds a stop that was asked for before all ranks have joined, which ends this one without them.

    In the wait for the others no signal handler of Python runs: a node that never comes would have this rank wait for
    half an hour, and heed nothing but a second signal.
    """

    def check() -> Exception | None:
        reason = None if have_met() else stop.reason()
        return None if reason is None else TrainingCanceled(reason)

    return lasting(MEETING_PATIENCE_S, check)


def told_to_wait(rank: int, ranks: int) -> Check:
    """Finds nothing, but says once that this rank still waits for the others to join."""
    began_at: float | None = time.monotonic()

    def check() -> Exception | None:
        nonlocal began_at
        if began_at is None or have_met():
            began_at = None
        elif time.monotonic() - began_at >= WAITS_SILENTLY_S:
            began_at = None
            hint = "; inside of `srun --pty` start it with srun again, or name `lightning.devices`" * in_srun_task()
            text = "rank %d has waited %g s for the other ranks: all %d have to be started, and to reach each other%s"
            log.warning(text, rank, WAITS_SILENTLY_S, ranks, hint)
        return None

    return check


def have_met() -> bool:
    """Whether all ranks have joined the process group."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _is_paused(pid: int) -> bool:
    """Whether a process of this machine is stopped (``SIGSTOP``, a debugger); False where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] in ("T", "t")
