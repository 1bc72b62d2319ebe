"""Whether rank zero is still there, for the other ranks: what waits for it would wait for half an hour."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from .artifacts_lock import lock_holder

__all__ = ["watch_first_rank"]

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
PATIENCE_S = 5.0
"""How long after rank zero has ended another rank may need to end by itself."""


def watch_first_rank(artifacts_dir: Path, end: Callable[[], None]) -> Callable[[], None]:
    """Call `end`, in a thread, some seconds after rank zero has ended, however it did; returns what stops the watch.

    Rank zero is seen by the lock that it holds on the artifacts directory. Where that was never seen, because the
    file system shows no locks of other machines or rank zero never came so far, the launcher has to end the rest.
    """
    stopped = threading.Event()

    def watch() -> None:
        was_there = False
        while not stopped.wait(LOOK_EVERY_S):
            is_there = _is_locked(artifacts_dir)
            if was_there and not is_there:
                break
            was_there = is_there
        if not stopped.wait(PATIENCE_S):
            log.error("rank 0 has ended, so this rank ends as well")
            end()

    threading.Thread(target=watch, name="genlight-first-rank", daemon=True).start()
    return stopped.set


def _is_locked(directory: Path) -> bool:
    try:
        return lock_holder(directory) is not None
    except OSError:  # a file system without locks
        return False
