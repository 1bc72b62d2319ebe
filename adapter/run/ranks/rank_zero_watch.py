"""Whether rank zero is still there, for the other ranks: what waits for it would wait for half an hour."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ..artifacts_lock import lock_holder

__all__ = ["rank_zero_announced", "rank_zero_is_gone", "rank_zero_process", "watch_rank_zero"]

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


def watch_rank_zero(artifacts_dir: Path, end: Callable[[], None]) -> Callable[[], None]:
    """Call `end`, in a thread, some seconds after rank zero has ended, however it did; returns what stops the watch.

    Rank zero is known by its process where it started this one. Elsewhere it is seen by the lock that it holds on the
    artifacts directory. Where that was never seen, because the file system shows no locks of other machines or rank
    zero never came so far, the launcher has to end the rest.
    """
    stopped = threading.Event()
    is_announced = _PROCESS_ID in os.environ

    def watch() -> None:
        was_there = is_announced
        while True:
            # The lock may be held again at once, by the next attempt.
            is_there = not rank_zero_is_gone() if is_announced else _is_locked(artifacts_dir)
            if was_there and not is_there:
                break
            was_there = is_there
            if stopped.wait(LOOK_EVERY_S):
                return
        if not stopped.wait(PATIENCE_S):
            log.error("rank 0 has ended, so this rank ends as well")
            end()

    threading.Thread(target=watch, name="genlight-rank-zero", daemon=True).start()
    return stopped.set


def _is_locked(directory: Path) -> bool:
    return lock_holder(directory) is not None
