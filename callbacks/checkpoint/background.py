"""Jobs that run in the background, one after the other."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...adapter.contract.exceptions import GenlightError, ThreadLimitError
from ...adapter.plumbing.threads import carry_out, started

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Pending:
    """A job in the background."""

    future: Future[Any]
    owner: object
    """The only caller that learns of a failure; None for the first caller that asks."""
    is_joint: bool
    """Whether all ranks do it together: a rank that raised its failure separately would leave the others waiting."""


class Background:
    """Runs jobs one after the other, each in a thread that waits for the one before.

    The threads are not daemons: an interpreter that exits lets the jobs finish. If the system has no room for a thread,
    the caller waits for its job.
    """

    def __init__(self) -> None:
        self._last: Future[Any] = Future()
        self._last.set_result(None)

    def submit(self, job: Callable[[], object]) -> Future[Any]:
        """Run `job` after those that were submitted before. Only one thread may call this."""
        before, future = self._last, Future[Any]()
        self._last = future

        def run() -> None:
            concurrent.futures.wait([before])
            carry_out(future, job)

        try:
            started(threading.Thread(target=run, name="genlight-checkpoint"))
        except ThreadLimitError:
            run()
        return future

    def run(self, job: Callable[[], object], doing: str) -> None:
        """Like `submit`, for a job that nobody waits for: its failure is logged, with `doing`."""

        def logged() -> None:
            try:
                job()
            except Exception as error:
                trace = None if isinstance(error, (GenlightError, OSError)) else error
                log.warning("Could not %s: %s: %s", doing, type(error).__name__, error, exc_info=trace)

        self.submit(logged)

    def finish(self) -> None:
        """Return when all jobs have ended."""
        concurrent.futures.wait([self._last])
