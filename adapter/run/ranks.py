"""The watch over the other ranks of a run: one thread that checks their files and processes.

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
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...callbacks.stop.sources import StopSources
from ..cluster.job_context import in_srun_task
from ..contract.exceptions import RankFailedError, StopReason, TrainingCanceled
from ..plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from ..plumbing.file_lock import holding_process, is_held
from ..plumbing.safe_open import open_own
from ..plumbing.threads import started
from .folder import LOCK_NAME
from .rank_files import RankFiles

if TYPE_CHECKING:
    import lightning.pytorch as pl


log = logging.getLogger(__name__)

Check = Callable[[], Exception | None]

POLL_S = 0.1
"""Seconds between two rounds of checks."""
SCAN_LOCKS_EVERY_S = 1.0
"""Seconds between two scans of the locks; testing the lock of another machine uses the network.

A process of this machine that ends is seen at once (`RankFiles.await_exit`).
"""
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
DEATHS = "GENLIGHT_DEATHS"
"""Variable that a supervisor sets for rank zero: the descriptor of a pipe with one line for each rank that failed."""
STORE = "GENLIGHT_STORE"
"""Variable that a supervisor sets for rank zero: the descriptor of the port at which rank zero opens the store."""
TIMES = "GENLIGHT_RESTART"
"""Variable that a supervisor sets after a restart: when a rank died, when all had ended, and when this rank was forked,
in seconds since 1970."""


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
        self.pause: Callable[[float], object] = time.sleep
        """Waits between two rounds of checks; it may return early."""
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
        while not self._closed.is_set():
            self.pause(POLL_S)
            for check in tuple(self._checks) if not self._closed.is_set() else ():
                error = check()
                if error is not None and check in self._checks and not self._closed.is_set():
                    self._end(error)
                    return


class RankProcesses:
    """The processes of other ranks that Lightning started from this one, or that a supervisor of `restarts.py` forked.

    There are none if another launcher starts them.

    Lightning's own observer kills all processes, including this one, up to five seconds after one has died. That may
    be before the run has reported it. `failed` therefore disables the observer; a `RankWatch` sees a death sooner.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        descriptor = os.environ.pop(DEATHS, None)
        self._deaths = None if descriptor is None else int(descriptor)
        self._ended = ""

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return getattr(self._trainer.strategy.launcher, "procs", [])

    def failed(self) -> str:
        """Return which rank ended first with another exit code than 0, and how; empty if none has."""
        for thread in threading.enumerate() if self._processes() else ():
            if thread.name == "child-process-observer":
                thread._child_processes = []  # type: ignore[attr-defined]  # an observer without children ends
        if self._deaths is not None and not self._ended and select.select([self._deaths], [], [], 0)[0]:
            self._ended = os.read(self._deaths, select.PIPE_BUF).decode().partition("\n")[0]
        first = self._trainer.global_rank + 1
        codes = ((rank, process.poll()) for rank, process in enumerate(self._processes(), start=first))
        return self._ended or next((end_of_rank(rank, code) for rank, code in codes if code), "")

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
        """Returns an error `RANK_ZERO_PATIENCE_S` after rank zero has ended in any way."""
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
            within_s: How long to wait for its exit code if this rank cannot see whether rank zero has ended.
            is_bounded: Whether `within_s` or an exit code also ends the wait if this rank sees that rank zero runs.

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
        files: On rank zero, the files of all ranks; None on other ranks.
        processes: The processes that this rank started.
    """
    scan_at, lost = 0.0, None

    def check() -> Exception | None:
        nonlocal scan_at, lost
        if files is not None and files.has_exited:  # a process that has ended writes no further record
            files.has_exited, lost = False, _lost_rank(files)
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
    dead = "" if processes is None else processes.failed()
    return _failure(dead) if dead else None


def end_of_rank(rank: int, code: int) -> str:
    """Return how a rank ended, in words; `code` is negative for a signal."""
    return f"rank {rank} {f'was killed by signal {-code}' if code < 0 else f'ended with exit code {code}'}"


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
