"""A request to stop a run, from another process or host; the command and the page of runs both make it."""

from __future__ import annotations

from pathlib import Path

from ..plumbing.durable import write_bytes_durably
from ..plumbing.safe_open import PRIVATE_FILE
from ..run.artifacts_lock import STOP_NAME

__all__ = ["request_stop", "withdraw_stop"]


def request_stop(folder: Path) -> None:
    """Ask the run in `folder` to stop.

    Raises:
        OSError: The folder cannot be written.
    """
    write_bytes_durably(folder / STOP_NAME, b"1\n", mode=PRIVATE_FILE)


def withdraw_stop(folder: Path) -> None:
    """Take the request back, once the run has ended; else its next start would have to."""
    (folder / STOP_NAME).unlink(missing_ok=True)
