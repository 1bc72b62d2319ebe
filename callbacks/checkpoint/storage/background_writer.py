"""One background save at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ....adapter.contract.exceptions import ThreadLimitError
from ....adapter.plumbing.threads import started

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Runs a save in a thread of its own; the next save waits for it.

    The thread is not a daemon: an interpreter that exits lets the save finish. An exception of the save is raised by
    the next call of any method, so that it reaches the training thread within a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self.failure: BaseException | None = None
        """What a job raised and has not been reported yet."""
        self._afterwards: list[Callable[[], object]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._is_busy

    def start(self, job: Callable[[], object]) -> None:
        """Run `job` in the background, after the one before it has ended.

        Raises:
            Exception: What the job before it raised; `job` is not started then.
        """
        self.wait()
        self._is_busy = True
        try:
            self._thread = started(threading.Thread(target=self._run, args=(job,), name="genlight-checkpoint"))
        except ThreadLimitError:  # training waits for the save then
            self._run(job)

    def afterwards(self, job: Callable[[], object]) -> None:
        """Run `job` once the save in flight has succeeded, at once if there is none; drop it if that save fails."""
        with self._lock:
            if self._is_busy:
                self._afterwards.append(job)
                return
        self.raise_failure()
        job()

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            Exception: What the last job raised; once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what a job in the background raised, once; returns at once."""
        if self.failure is not None:
            error, self.failure = self.failure, None
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        next_job: Callable[[], object] | None = job
        try:
            while next_job is not None:
                next_job()
                next_job = self._next()
        except BaseException as error:  # noqa: BLE001 - it is raised in the training thread
            with self._lock:
                self._afterwards.clear()
                self.failure = error
                self._is_busy = False

    def _next(self) -> Callable[[], object] | None:
        with self._lock:  # So that `afterwards` cannot add to a list that will not be read again.
            if self._afterwards:
                return self._afterwards.pop(0)
            self._is_busy = False
            return None
