"""How far the inputs are: told from several threads, and shown as bars on a terminal or as lines in the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ..plumbing.text import size_text

__all__ = ["InputProgress", "ProgressReport", "Tracker", "shown_progress"]

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class InputProgress:
    """State of one input's transfer."""

    name: str
    """The reference without credentials."""
    done_bytes: int
    total_bytes: int | None
    """None until the server has said."""
    finished: bool = False


ProgressReport: TypeAlias = Callable[[InputProgress], None]
"""Receives every change; called from one thread at a time."""


class Tracker:
    """Hands progress on, one call at a time, and asks between any two pieces whether the run was stopped.

    Args:
        report: Receives the progress; None drops it.
        raise_if_stopped: Raises to end all transfers; None never does.
    """

    def __init__(
        self, report: ProgressReport | None = None, raise_if_stopped: Callable[[], None] | None = None
    ) -> None:
        self._report = report
        self._raise_if_stopped = raise_if_stopped
        self._lock = threading.Lock()
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Make every transfer end at its next piece, and every wait at once."""
        self._abandoned.set()

    def check(self) -> None:
        """Raise if the transfers should end.

        Raises:
            TransferAbandoned: Another transfer has failed or was stopped.
        """
        if self._abandoned.is_set():
            raise TransferAbandoned
        if self._raise_if_stopped is not None:
            self._raise_if_stopped()

    def wait(self, seconds: float) -> None:
        """Sleep in short pieces, so that a stop is noticed; raises like `check`."""
        remaining = seconds
        while remaining > 0:
            self.check()
            self._abandoned.wait(min(remaining, 0.1))
            remaining -= 0.1
        self.check()

    def tell(self, progress: InputProgress) -> None:
        """Report progress, then `check`."""
        if self._report is not None:
            with self._lock:
                self._report(progress)
        self.check()


class TransferAbandoned(Exception):
    """This transfer ended because another one did."""


@contextlib.contextmanager
def shown_progress() -> Iterator[ProgressReport]:
    """A report for `materialize_inputs` that people can watch, on standard error."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    with _bars() as report:
        yield report


class _Lines:
    """A line in the log when an input is there, and every few seconds while one is not."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def __call__(self, progress: InputProgress) -> None:
        now = time.monotonic()
        if progress.finished:
            log.info("%s is here (%s)", progress.name, size_text(progress.done_bytes))
        elif now - self._last_s.setdefault(progress.name, now) >= LINE_EVERY_S:
            self._last_s[progress.name] = now
            total = f" of {size_text(progress.total_bytes)}" if progress.total_bytes else ""
            log.info("%s: %s%s", progress.name, size_text(progress.done_bytes), total)


@contextlib.contextmanager
def _bars() -> Iterator[ProgressReport]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(progress: InputProgress) -> None:
            if progress.name not in tasks:
                tasks[progress.name] = bars.add_task(progress.name.rpartition("/")[2], total=progress.total_bytes)
            bars.update(tasks[progress.name], completed=progress.done_bytes, total=progress.total_bytes)

        yield report
