"""The processes of other ranks that Lightning started from this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

from ...contract.exceptions import RankFailed
from ...plumbing.threads import started

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["RankProcesses", "watching_node"]

LOOK_EVERY_S = 0.1


class RankProcesses(Sequence[subprocess.Popen[bytes]]):
    """Those that run now: none before they are started, or where another launcher did.

    Lightning's own observer kills all processes, this one too, up to five seconds after one has died, which may be
    before the run has reported it. It is put to rest here: what has died is seen by `watch_ranks` sooner.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        processes: list[subprocess.Popen[bytes]] = getattr(self._trainer.strategy.launcher, "procs", [])
        if processes:
            for thread in threading.enumerate():
                if thread.name == "child-process-observer":
                    thread._child_processes = []  # type: ignore[attr-defined]  # one without children ends
        return processes

    @overload
    def __getitem__(self, index: int) -> subprocess.Popen[bytes]: ...
    @overload
    def __getitem__(self, index: slice) -> list[subprocess.Popen[bytes]]: ...
    def __getitem__(self, index: int | slice) -> subprocess.Popen[bytes] | list[subprocess.Popen[bytes]]:
        return self._processes()[index]

    def __iter__(self) -> Iterator[subprocess.Popen[bytes]]:
        return iter(self._processes())

    def __len__(self) -> int:
        return len(self._processes())

    @property
    def first_rank(self) -> int:
        """The rank of the first of them, which follows this process's own."""
        return self._trainer.global_rank + 1

    def ids(self) -> dict[int, int]:
        """The process id of each rank that runs."""
        numbered = enumerate(self._processes(), start=self.first_rank)
        return {rank: process.pid for rank, process in numbered if process.poll() is None}

    def killed(self) -> tuple[int, int] | None:
        """The rank that was killed by a signal, and its number; None where none was."""
        for rank, process in enumerate(self._processes(), start=self.first_rank):
            if (process.poll() or 0) < 0:
                return rank, -process.returncode
        return None

    def kill_at_once(self) -> None:
        """As `kill`, from a signal handler: takes no lock, and waits for nothing."""
        for process in getattr(self._trainer.strategy.launcher, "procs", []):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End them at once: one that hangs in a collective heeds nothing else."""
        for process in self._processes():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def watching_node(processes: RankProcesses, end: Callable[[RankFailed], None]) -> Iterator[None]:
    """Call `end`, in a thread, when a rank that this process has started on a further node is killed in this block.

    Rank zero cannot see it. One that ends by itself tells rank zero why, which ends all.
    """
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(LOOK_EVERY_S):
            killed = processes.killed()
            if killed is not None:
                end(RankFailed(f"rank {killed[0]} was killed by signal {killed[1]}"))
                return

    started(threading.Thread(target=watch, name="genlight-node", daemon=True))
    try:
        yield
    finally:
        stopped.set()
