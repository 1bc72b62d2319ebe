"""The wait of a rank for the others to come, in which no signal handler of Python runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .exceptions import TrainingCanceled

__all__ = ["watch_meeting"]

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
PATIENCE_S = 2.0
"""How long after a stop was asked for the others may still come, so that all end in the usual way."""


def watch_meeting(raise_if_stopped: Callable[[], None], end: Callable[[TrainingCanceled], None]) -> Callable[[], None]:
    """Call `end`, in a thread, when a stop is asked for before the ranks have met; returns what stops the watch.

    A node that never comes would have this rank wait for half an hour, and heed nothing but a second signal.

    Args:
        raise_if_stopped: Raises `TrainingCanceled` once a stop is asked for.
        end: Takes what was raised, and ends the process.
    """
    stopped = threading.Event()

    def watch() -> None:
        from torch import distributed

        while not (distributed.is_available() and distributed.is_initialized()) and not stopped.wait(LOOK_EVERY_S):
            try:
                raise_if_stopped()
            except TrainingCanceled as error:
                if not stopped.wait(PATIENCE_S) and not distributed.is_initialized():
                    log.warning("other ranks have not come, so this one ends without them")
                    end(error)
                return

    threading.Thread(target=watch, name="genlight-meeting", daemon=True).start()
    return stopped.set
