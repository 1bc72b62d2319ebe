"""Wakes a hook by the clock, so that no step has to look at it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from ...adapter.plumbing.threads import started
from .cadence import NEVER
from .hook import Hook

__all__ = ["Ticker"]

SHORTEST_S = 0.01
"""A hook that acts more often is called after each step."""
LATE = 1.02
"""How much more than the time to the next tick a thread sleeps: after one that was heeded at once it then is due."""


class Ticker:
    """Has a hook called by the clock: after the step that runs when it is due, and not after those before.

    For hooks whose ``on_train_batch_end`` is `skippable`. A thread sets their ``next_due_step`` to 0: steps of 0.2 ms
    pay less for twenty such wakes a second than for a look at the clock in every eighth of them.

    Args:
        hook: Calls `rest` once it has nothing to do until the next tick.
        every_s: About how far apart ticks are, in seconds.
        due_at: When `hook` is due, on the clock of ``time.monotonic``; asked in the thread.
    """

    def __init__(self, hook: Hook, every_s: float, due_at: Callable[[], float]) -> None:
        self._hook = hook
        self._every_s = every_s
        self._due_at = due_at
        # Not an Event: an interrupt inside of its `set` can leave its lock held for ever.
        self._stopped: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; raises a `ThreadLimitError` where no thread can be started."""
        if self._every_s >= SHORTEST_S:
            self._thread = started(threading.Thread(target=self._tick, name="genlight-ticker", daemon=True))

    def stop(self) -> None:
        """End, and wait for the thread; a second time, nothing happens."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.put(None)
            thread.join()

    def rest(self) -> None:
        """Let steps pass until the next tick. What wakes the hook from now on is not forgotten."""
        self._hook.next_due_step = 0 if self._thread is None else NEVER

    def _tick(self) -> None:
        wait_s = self._every_s
        while True:
            try:
                self._stopped.get(timeout=wait_s)
            except queue.Empty:
                wait_s = self._due_at() - time.monotonic()
                if wait_s <= 0:
                    self._hook.next_due_step = 0
                    wait_s = self._every_s * LATE
            else:
                return
