"""The exit code of rank zero, with which the other ranks end too: launchers look at the code of every process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from ...plumbing.durable import write_bytes_durably
from ...plumbing.safe_open import PRIVATE_FILE, read_own
from .failure_notes import launch_id

__all__ = ["exit_code_of_rank_zero", "forget_exit_code", "leave_exit_code", "wait_for_rank_zero"]

log = logging.getLogger(__name__)

FILE = ".rank-zero-exit.json"
LONGEST_NOTE_BYTES = 4096
LOOK_EVERY_S = 0.1


class ExitNote(msgspec.Struct, frozen=True):
    """What rank zero leaves in the run's folder when it ends."""

    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    launch: str


def forget_exit_code(artifacts_dir: Path) -> None:
    """Remove what an earlier attempt has left, before this one's other ranks can look."""
    (artifacts_dir / FILE).unlink(missing_ok=True)


def leave_exit_code(artifacts_dir: Path, exit_code: int) -> None:
    """Leave the exit code of rank zero for the other ranks; without it, to them it was killed."""
    note = msgspec.json.encode(ExitNote(exit_code, launch_id()))
    try:
        write_bytes_durably(artifacts_dir / FILE, note, mode=PRIVATE_FILE)
    except OSError as error:
        log.warning("the other ranks could not be told how the run ended: %s", error)


def exit_code_of_rank_zero(artifacts_dir: Path) -> int | None:
    """What rank zero of this launch has left; None where it has not ended in a way that leaves one."""
    try:
        note = msgspec.json.decode(read_own(artifacts_dir / FILE, limit=LONGEST_NOTE_BYTES), type=ExitNote)
    except (OSError, ValueError, RecursionError):
        return None
    return note.exit_code if note.launch == launch_id() else None


def wait_for_rank_zero(artifacts_dir: Path, *, is_gone: Callable[[], bool | None], within_s: float) -> int | None:
    """Stay until rank zero has ended, which a launcher that sees another rank leave with an error may end too early.

    Args:
        artifacts_dir: The run's folder, which all ranks share.
        is_gone: Whether rank zero has ended; None where that cannot be seen.
        within_s: How long to wait for its exit code where its end cannot be seen.

    Returns:
        Its exit code; None where it left none.
    """
    end = time.monotonic() + within_s
    while True:
        gone = is_gone()
        code = exit_code_of_rank_zero(artifacts_dir)
        if gone or (gone is None and (code is not None or time.monotonic() >= end)):
            return code
        time.sleep(LOOK_EVERY_S)
