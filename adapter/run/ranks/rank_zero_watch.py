"""Whether rank zero is still there, for the other ranks: what waits for it would wait for half an hour."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ...plumbing.threads import started
from ..artifacts_lock import lock_holder

__all__ = ["RankZero", "rank_zero_announced", "rank_zero_is_gone", "rank_zero_process"]

log = logging.getLogger(__name__)

_PROCESS_ID = "GENLIGHT_RANK_ZERO_PID"
LOOK_EVERY_S = 0.5
PATIENCE_S = 5.0
"""How long after rank zero has ended another rank may need to end by itself."""


@contextlib.contextmanager
def rank_zero_announced() -> Iterator[None]:
    """Let the ranks that are started from this process meanwhile know that it is the first."""
    os.environ[_PROCESS_ID] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_PROCESS_ID]


def rank_zero_process() -> dict[int, int]:
    """The process id of rank zero, by its rank; empty where another launcher started this one."""
    announced = os.environ.get(_PROCESS_ID)
    return {} if announced is None else {0: int(announced)}


def rank_zero_is_gone() -> bool:
    """Whether the process that started this one as a rank has ended; False where another launcher did."""
    announced = os.environ.get(_PROCESS_ID)
    if announced is None:
        return False
    try:
        os.kill(int(announced), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is there, as another user
        return False
    return False


class RankZero:
    """Rank zero, as another rank sees it.

    It is known by its process where it started this one. Elsewhere it is seen by the lock that it holds on the
    artifacts directory. Where that was never seen, because the file system shows no locks of other machines or rank
    zero never came so far, the launcher has to end the rest.
    """

    def __init__(self, artifacts_dir: Path) -> None:
        self._directory = artifacts_dir
        self._is_announced = _PROCESS_ID in os.environ
        self._was_locked = False
        self._unlocked = False
        self._stopped = threading.Event()

    def is_gone(self) -> bool | None:
        """Whether it has ended; None where that cannot be seen."""
        if self._is_announced and rank_zero_is_gone():
            return True
        # Held again at once, it is the next attempt's.
        is_locked = _is_locked(self._directory)
        self._unlocked = self._unlocked or (self._was_locked and not is_locked)
        self._was_locked = is_locked
        if self._unlocked:
            return True
        return False if is_locked or self._is_announced else None

    def watch(self, end: Callable[[], None]) -> None:
        """Call `end`, in a thread, some seconds after it has ended, however it did; until `end_watch`."""

        def look() -> None:
            while not self.is_gone():
                if self._stopped.wait(LOOK_EVERY_S):
                    return
            if not self._stopped.wait(PATIENCE_S):
                log.error("rank 0 has ended, so this rank ends as well")
                end()

        started(threading.Thread(target=look, name="genlight-rank-zero", daemon=True))

    def end_watch(self) -> None:
        """From now on this rank ends by itself."""
        self._stopped.set()


def _is_locked(directory: Path) -> bool:
    return lock_holder(directory) is not None
