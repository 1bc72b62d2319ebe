"""One thread that looks at the other ranks, while this rank may wait for them in a collective for half an hour.

What it looks for is a list of checks. Each returns an exception once it has found something, and the watch hands that
to the attempt, which names the rank and ends within a bounded time:

=================================  ====================================================  ===============
check                              finds                                                 looks on
=================================  ====================================================  ===============
`failed_ranks`                     a record of a failure; a process that ended           rank zero
`lost_ranks`                       a rank of another launcher that was killed            rank zero
`killed_on_this_node`              a process that was killed on a further node           its first rank
`paused_ranks`                     a stop that a paused process does not answer          all
`stopped_before_meeting`           a stop while not all ranks have come                  all
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
from typing import TYPE_CHECKING, Any

from ....callbacks.stop.sources import StopSources
from ...contract.exceptions import RankFailedError, StopReason, TrainingCanceled
from ...plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from ...plumbing.threads import started
from ..artifacts_lock import lock_holder, locking_process
from .rank_files import RankFiles

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "Check",
    "FailedElsewhere",
    "RankProcesses",
    "RankWatch",
    "RankZero",
    "after",
    "agent_check",
    "failed_ranks",
    "first_cause",
    "kill_paused",
    "killed_on_this_node",
    "lost_ranks",
    "paused_ranks",
    "stopped_before_meeting",
]

log = logging.getLogger(__name__)

Check = Callable[[], Exception | None]

LOOK_EVERY_S = 0.1
NOTE_PRESENT_EVERY_S = 60.0
ASK_FOR_LOCKS_EVERY_S = 1.0
"""A lock of another machine is asked for over the network."""
HEARD_WITHIN_S = 2.0
"""How long rank zero, when it fails, waits to hear of a failure that came before its own."""
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

    def _processes(self) -> dict[int, subprocess.Popen[bytes]]:
        """By rank, which follow this process's own."""
        processes: list[subprocess.Popen[bytes]] = getattr(self._trainer.strategy.launcher, "procs", [])
        if processes:
            for thread in threading.enumerate():
                if thread.name == "child-process-observer":
                    thread._child_processes = []  # type: ignore[attr-defined]  # one without children ends
        return dict(enumerate(processes, start=self._trainer.global_rank + 1))

    def ids(self) -> dict[int, int]:
        """The process id of each rank that runs."""
        return {rank: process.pid for rank, process in self._processes().items() if process.poll() is None}

    def failed(self) -> tuple[int, int] | None:
        """The first rank whose process ended with another exit code than 0, and that code; below 0 a signal."""
        codes = ((rank, process.poll()) for rank, process in self._processes().items())
        return next(((rank, code) for rank, code in codes if code), None)

    def kill(self) -> None:
        """End them at once: one that hangs in a collective heeds nothing else. Takes no lock, for signal handlers."""
        for process in getattr(self._trainer.strategy.launcher, "procs", []):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


class RankZero:
    """Rank zero, as another rank sees it.

    It is known by its process where it started this one. Elsewhere it is seen by the lock that it holds on the run's
    folder. Where that was never seen, because the file system shows no locks of other machines or rank zero never came
    so far, the launcher has to end the rest.
    """

    def __init__(self, artifacts_dir: Path) -> None:
        self._directory = artifacts_dir
        announced = os.environ.get(_RANK_ZERO_PROCESS)
        self._process = None if announced is None else int(announced)
        self._was_locked = False
        self._unlocked = False
        self._gone_at: float | None = None

    @staticmethod
    @contextlib.contextmanager
    def announced() -> Iterator[None]:
        """Let the ranks that are started from this process meanwhile know that it is the first."""
        os.environ[_RANK_ZERO_PROCESS] = str(os.getpid())
        try:
            yield
        finally:
            del os.environ[_RANK_ZERO_PROCESS]

    @property
    def started_this_process(self) -> bool:
        """Whether it did, rather than another launcher."""
        return self._process is not None

    def processes(self) -> dict[int, int]:
        """Its process id, by its rank, whoever started it; empty where it runs on another machine."""
        process = self._process or locking_process(self._directory)
        return {} if process is None else {0: process}

    def has_exited(self) -> bool:
        """Whether the process that started this one has ended; False where another launcher did."""
        if self._process is None:
            return False
        try:
            os.kill(self._process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it is there, as another user
            pass
        return False

    def is_gone(self) -> bool | None:
        """Whether it has ended; None where that cannot be seen."""
        if self.has_exited():
            return True
        is_locked = lock_holder(self._directory) is not None
        self._unlocked = self._unlocked or (self._was_locked and not is_locked)  # held again, it is the next attempt's
        self._was_locked = is_locked
        if self._unlocked:
            return True
        return False if is_locked or self._process is not None else None

    def check(self) -> Exception | None:
        """`RankFailedError` some seconds after it has ended, however it did."""
        now = time.monotonic()
        if self._gone_at is None and self.is_gone():
            self._gone_at = now
        is_over = self._gone_at is not None and now - self._gone_at >= RANK_ZERO_PATIENCE_S
        return RankFailedError("rank 0 has ended, so this rank ends as well") if is_over else None

    def wait_for_end(self, files: RankFiles, *, within_s: float, at_most_s: float | None = None) -> int | None:
        """Stay until it has ended, which a launcher that sees another rank leave with an error may end too early.

        Args:
            files: Where it leaves its exit code.
            within_s: How long to wait for that code where its end cannot be seen.
            at_most_s: How long to wait for that code although it lives; None waits for its end.

        Returns:
            Its exit code; None where it left none.
        """
        began = time.monotonic()
        while True:
            gone, waited_s = self.is_gone(), time.monotonic() - began
            code = files.exit_code()
            is_bounded = gone is None or at_most_s is not None
            limit_s = within_s if at_most_s is None else at_most_s
            if gone or (is_bounded and (code is not None or waited_s >= limit_s)):
                return code
            time.sleep(LOOK_EVERY_S)


def agent_check() -> Callable[[], StopReason | None]:
    """A check for `StopSources.add_check`: a rank whose agent of torchrun was killed saves and ends.

    Else it would train on with nobody to see it, and keep a new launcher out of the run's folder.
    """
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return lambda: "preempted" if agent is not None and os.getppid() != agent else None


def failed_ranks(files: RankFiles, processes: RankProcesses) -> Check:
    """Finds the oldest failure that a rank noted, or a process that died without a word."""

    def check() -> Exception | None:
        failure = first_failure(files, processes)
        if failure is None:
            return None
        stopped = failure.exit_code == EXIT_STOPPED
        return TrainingCanceled(failure.category) if stopped else FailedElsewhere(failure)

    return check


def first_failure(files: RankFiles, processes: RankProcesses | None) -> Failure | None:
    """The oldest failure that a rank noted; of a process that died without a word where none did."""
    for record in files.failures():
        return record.failure
    dead = None if processes is None else processes.failed()
    return None if dead is None else _lost(f"rank {dead[0]} {_how_it_ended(dead[1])}")


def after(seconds: float, check: Check) -> Check:
    """`check`, whose finding counts once it has stood for `seconds`: training may end by itself of the same cause."""
    found: Exception | None = None
    found_at = 0.0

    def patient() -> Exception | None:
        nonlocal found, found_at
        if found is None:
            found, found_at = check(), time.monotonic()
        return found if found is not None and time.monotonic() - found_at >= seconds else None

    return patient


def lost_ranks(files: RankFiles) -> Check:
    """Finds a rank of another launcher that was killed, or whose node was: each that was seen once all had met."""
    note_at = ask_at = 0.0

    def check() -> Exception | None:
        nonlocal note_at, ask_at
        now = time.monotonic()
        if now >= note_at and have_met():
            files.remember_who_is_present()
            note_at = now + NOTE_PRESENT_EVERY_S
        if now < ask_at:
            return None
        ask_at = now + ASK_FOR_LOCKS_EVERY_S
        failure = first_lost(files)
        return None if failure is None else FailedElsewhere(failure)

    return check


def first_cause(own: Failure, at_s: float, files: RankFiles, processes: RankProcesses | None) -> Failure:
    """The failure to report where rank zero failed with `own` at `at_s` (seconds since 1970): it, or an older one."""
    end = time.monotonic() + HEARD_WITHIN_S
    other = first_lost(files)
    while other is None and time.monotonic() < end:
        heard = first_failure(files, processes)
        came_later = any(record.failure == heard for record in files.failures() if record.at_s >= at_s)
        other = None if came_later else heard
        time.sleep(LOOK_EVERY_S)
    return own if other is None else dataclasses.replace(other, resumable=own.resumable)


def first_lost(files: RankFiles) -> Failure | None:
    """A rank that ended without a word; the others fail because of that."""
    for rank, host in files.lost().items():
        return _lost(f"rank {rank} on {host} ended without a word: it was killed, or its node was lost")
    return None


def killed_on_this_node(processes: RankProcesses) -> Check:
    """Finds a process that was killed on a further node, where rank zero can't see it; others tell rank zero why."""

    def check() -> Exception | None:
        dead = processes.failed()
        return RankFailedError(f"rank {dead[0]} {_how_it_ended(dead[1])}") if dead is not None and dead[1] < 0 else None

    return check


def paused_ranks(processes: Callable[[], Mapping[int, int]], stop: StopSources) -> Check:
    """Finds a process that stays paused after a stop was asked for; the others wait for it in a collective.

    Args:
        processes: Gives the process id of each rank on this machine that can be looked at.
        stop: Says whether a stop was asked for.
    """
    since: dict[int, float] = {}

    def check() -> Exception | None:
        nonlocal since
        if not stop.is_stopping():
            return None
        now = time.monotonic()
        paused = {rank: pid for rank, pid in processes().items() if _is_paused(pid)}
        since = {rank: since.get(rank, now) for rank in paused}
        for rank, began in since.items():
            if now - began >= PAUSE_PATIENCE_S:
                who = f"rank {rank} (process {paused[rank]})"
                return RankFailedError(f"{who} is paused and did not answer the stop within {PAUSE_PATIENCE_S:g} s")
        return None

    return check


def kill_paused(processes: Mapping[int, int]) -> None:
    """Kill the paused ones of `processes`, by rank: nothing else ends them, and their launcher waits for them."""
    for rank, pid in processes.items():
        if _is_paused(pid):
            log.warning("rank %d (process %d) is paused and is killed, since the run has ended", rank, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def stopped_before_meeting(stop: StopSources) -> Check:
    """Finds a stop that was asked for before all ranks have joined.

    In the wait for the others no signal handler of Python runs: a node that never comes would have this rank wait for
    half an hour, and heed nothing but a second signal.
    """
    asked_at: float | None = None

    def check() -> Exception | None:
        nonlocal asked_at
        reason = None if have_met() else stop.reason()
        if reason is None:
            return None
        now = time.monotonic()
        asked_at = now if asked_at is None else asked_at
        if now - asked_at < MEETING_PATIENCE_S:
            return None
        log.warning("the other ranks have not joined, so this one ends without them")
        return TrainingCanceled(reason)

    return check


def have_met() -> bool:
    """Whether all ranks have joined the process group."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _lost(what: str) -> Failure:
    return Failure("train-step", f"train-step:RankFailedError: {what}", resumable=False, exit_code=EXIT_FAILED)


def _how_it_ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _is_paused(pid: int) -> bool:
    """Whether a process of this machine is stopped (``SIGSTOP``, a debugger); False where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(") ")[2][:1] in ("T", "t")
