"""Threads: one that may find no room, as users and containers have a limit that counts them, and a pool of daemons."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..contract.exceptions import ThreadLimitError

__all__ = ["DaemonThreads", "carry_out", "started"]

T = TypeVar("T")


def started(thread: threading.Thread) -> threading.Thread:
    """Start `thread` and return it.

    Raises:
        ThreadLimitError: The system has no room for another thread; one that was not started must not be joined.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadLimitError(
            f"No thread could be started for {thread.name} ({error}). Raise the limit on processes and threads "
            "(`ulimit -u`, or the container's limit on pids), or use fewer `workers`."
        ) from error
    return thread


class DaemonThreads:
    """One thread for each call, a few at a time; the standard pool keeps a process alive until its threads end.

    Args:
        most: How many calls run at once.
        name: Start of the names of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._turns = threading.Semaphore(most)
        self._name = name

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The result of `call`, once a thread of its own has it."""
        future: Future[T] = Future()

        def run() -> None:
            with self._turns:
                carry_out(future, call)

        started(threading.Thread(target=run, name=self._name, daemon=True))
        return future


def carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    """Give `future` what `call` returns or raises; a future that was canceled does not call it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        future.set_exception(error)
