"""Signals that ask a process to stop, as a flag that is looked at between steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..adapter.exceptions import StopReason

__all__ = ["REASON_OF_SIGNAL", "StopSignals"]

REASON_OF_SIGNAL: dict[signal.Signals, StopReason] = {
    signal.SIGTERM: "preempted",
    signal.SIGUSR1: "preempted",
    signal.SIGINT: "canceled",
}


class StopSignals:
    """Notes the first stop signal; the second one ends the process at once.

    Nothing else happens inside the handler: saving there could meet a half-made step or a held lock.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self._received: list[int] = []

    def install(self) -> None:
        """Handle the signals of `REASON_OF_SIGNAL`; a thread that is not the main one cannot, and leaves them alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in REASON_OF_SIGNAL:
            signal.signal(number, self._note)

    @contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Handle the signals for the length of a block, and as before it afterwards."""
        before = {number: signal.getsignal(number) for number in REASON_OF_SIGNAL}
        self.install()
        try:
            yield self
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    # None: it was not installed from Python, and cannot be put back from there.
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        # Counted in one step: a handler may be interrupted by the next signal between a look and a note.
        self._received.append(number)
        if len(self._received) == 1:
            self.reason = REASON_OF_SIGNAL[signal.Signals(number)]
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # the first process of a container ignores signals without a handler, also its own
