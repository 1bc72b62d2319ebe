"""Threads that a process does not wait for when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from typing_extensions import override

from .threads import started

__all__ = ["DaemonThreads"]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """One thread for each call, a few at a time; the standard pool keeps a process alive until its threads end.

    Args:
        most: How many calls run at once.
        name: Start of the names of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._turns = threading.Semaphore(most)
        self._name = name

    @override
    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            with self._turns:
                _carry_out(future, lambda: call(*args, **kwargs))

        started(threading.Thread(target=run, name=self._name, daemon=True))
        return future


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
        future.set_exception(error)
