"""Shows how the inputs come in: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

from .progress import InputProgress, ProgressReport

__all__ = ["shown_progress"]

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


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
            log.info("%s is here (%s)", progress.name, _size(progress.done_bytes))
        elif now - self._last_s.setdefault(progress.name, now) >= LINE_EVERY_S:
            self._last_s[progress.name] = now
            total = f" of {_size(progress.total_bytes)}" if progress.total_bytes else ""
            log.info("%s: %s%s", progress.name, _size(progress.done_bytes), total)


def _size(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


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
