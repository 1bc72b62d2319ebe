"""Which checkpoint ``genlight fit``, ``validate``, ``test`` and ``predict`` start from."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...callbacks.checkpoint.format.record import CheckpointRecord
from ...callbacks.checkpoint.selection import find_checkpoint, find_final, newest_valid
from ..contract.exceptions import BrokenCheckpointError
from .fit_failures import UnusableConfigurationError, text_of_error

__all__ = ["WORDS_OF_LIGHTNING", "named_checkpoint", "newest_checkpoint", "refuse_older_end"]

WORDS_OF_LIGHTNING = ("best", "hpc", "last")
"""What ``--ckpt_path`` takes besides a path."""


def named_checkpoint(given: str) -> Path | None:
    """The record that `given` means; None where Lightning may know what to do with it, or says that it does not."""
    if given in WORDS_OF_LIGHTNING:
        return None
    try:
        return find_checkpoint(given)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(error) from error


def newest_checkpoint(directory: Path) -> tuple[CheckpointRecord | None, list[str]]:
    """The newest whole checkpoint in `directory`, and warnings about those that were passed over."""
    try:
        record, warnings = newest_valid(directory)
    except OSError as error:
        raise _unreadable(error) from error
    return record, list(warnings)


def refuse_older_end(directory: Path | None) -> None:
    """Refuse the end of a run of an older runtime, which tells no step: what comes after it cannot be counted."""
    with contextlib.suppress(BrokenCheckpointError, OSError):  # which the look for the newest tells
        final = None if directory is None else find_final(directory)
        if final is not None and final.is_old:
            raise UnusableConfigurationError(
                f"{str(final.path)!r} is the end of a run of an older runtime: there is nothing to train. Name the "
                "checkpoint to go on from by `--ckpt_path`, or choose another `dirpath`."
            )


def _unreadable(error: OSError) -> UnusableConfigurationError:
    return UnusableConfigurationError(f"{text_of_error(error)}; let this user read it, or move it away")
