"""Progress of the inputs: reported from several threads, and shown as lines in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..plumbing.text import size_text

__all__ = ["InputProgress", "ProgressReport", "Tracker", "TransferAbandoned", "log_progress"]

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


def log_progress() -> ProgressReport:
    """A report for `materialize_inputs`: a line when an input is there, and every few seconds while one is not."""
    last_s: dict[str, float] = {}

    def report(progress: InputProgress) -> None:
        now = time.monotonic()
        if progress.finished:
            log.info("%s is here (%s)", progress.name, size_text(progress.done_bytes))
        elif now - last_s.setdefault(progress.name, now) >= LINE_EVERY_S:
            last_s[progress.name] = now
            total = f" of {size_text(progress.total_bytes)}" if progress.total_bytes else ""
            log.info("%s: %s%s", progress.name, size_text(progress.done_bytes), total)

    return report
