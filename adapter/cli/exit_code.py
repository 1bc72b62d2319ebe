"""The exit code of a run, kept to the end of its process."""

from __future__ import annotations

import os
import signal

from ...callbacks.stop.signals import REASON_OF_SIGNAL

__all__ = ["keep_exit_code"]


def keep_exit_code(code: int) -> None:
    """Let a stop signal end this process with `code`, at once, from here on.

    How the run ended has been reported by now. A process with torch in it needs a second to end, and a signal in that
    time would have its exit code say otherwise.
    """
    for number in REASON_OF_SIGNAL:
        signal.signal(number, lambda *_: os._exit(code))
