"""The processes of other ranks that Lightning started from this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from .failures import EXIT_FAILED

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["RankProcesses", "first_rank_announced", "first_rank_is_gone", "leave_with_first_rank"]

_FIRST_RANK = "GENLIGHT_FIRST_RANK_PID"
_POLL_S = 0.1


@contextlib.contextmanager
def first_rank_announced() -> Iterator[None]:
    """Let the processes that are started meanwhile know which one they belong to."""
    os.environ[_FIRST_RANK] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_FIRST_RANK]


def first_rank_is_gone() -> bool:
    """Whether the process that started this one as a rank has died; False where another launcher did."""
    announced = os.environ.get(_FIRST_RANK)
    if announced is None:
        return False
    try:
        os.kill(int(announced), 0)
    except ProcessLookupError:
        return True
    return False


def leave_with_first_rank() -> None:
    """End this process, whatever it does, soon after the one that started it has died.

    A rank that waits for others to meet, or in a collective on a device, would notice only after half an hour.
    """

    def watch() -> None:
        while not first_rank_is_gone():
            time.sleep(_POLL_S)
        os._exit(EXIT_FAILED)

    if _FIRST_RANK in os.environ:
        threading.Thread(target=watch, name="genlight-first-rank", daemon=True).start()


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

    def kill(self) -> None:
        """End them at once: one that hangs in a collective heeds nothing else."""
        for process in self._processes():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
