"""Start threads, with an error that names the limit if one is reached, and run calls in daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..contract.exceptions import ThreadLimitError

T = TypeVar("T")


def started(thread: threading.Thread) -> threading.Thread:
    """Start `thread` and return it.

    Raises:
        ThreadLimitError: A limit allows no further thread. A thread that was not started must not be joined.
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
    """Runs each call in a daemon thread, a few at a time; threads of the standard pool would delay the exit.

    Args:
        most: Maximum number of calls at once.
        name: Name of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._turns = threading.Semaphore(most)
        self._name = name

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a new thread; return the future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            with self._turns:
                carry_out(future, call)

        started(threading.Thread(target=run, name=self._name, daemon=True))
        return future


def carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    """Set `future` to the result or exception of `call`; a canceled future does not call it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by `future.result()`
        future.set_exception(error)
