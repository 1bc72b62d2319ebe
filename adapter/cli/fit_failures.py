"""How ``genlight fit``, ``validate`` and ``test`` tell what ended them: as ``genlight run`` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from ..contract.exceptions import FailureCategory, TrainingCanceled
from ..plumbing.failures import EXIT_COMPLETED, EXIT_STOPPED, describe_failure
from ..run.outcome import log_failure
from ..run.traceback_report import FAILURES_DIRECTORY

__all__ = ["FailureReport", "UnusableConfigurationError", "text_of_error"]

log = logging.getLogger(__name__)


class UnusableConfigurationError(Exception):
    """A configuration asks for what it cannot have."""


@dataclass
class FailureReport:
    """What is known of a command when it fails; filled as it goes on."""

    secrets: Sequence[str | None] = ()
    """Texts that must not be shown."""
    folder: Path | None = None
    """Where whole tracebacks go; None shows them."""
    stage: FailureCategory = "model-load"
    """What is going on, for a failure whose type does not tell its category."""
    saves: bool = False
    """Whether the command leaves checkpoints."""

    def tell(self, error: Exception) -> int:
        """Say what ended the command, and return its exit code."""
        failure = describe_failure(error, has_checkpoint=False, stage=self.stage, secrets=self.secrets)
        tracebacks = None if self.folder is None else self.folder / FAILURES_DIRECTORY
        log_failure(error, failure, secrets=self.secrets, tracebacks=tracebacks)
        return failure.exit_code

    def tell_stop(self, stop: TrainingCanceled) -> int:
        """Say that the command was stopped, and return its exit code."""
        way_on = (
            "start again with --resume auto to go on"
            if self.saves
            else "the callback genlight.callbacks.Checkpoint would have saved a checkpoint to go on from"
        )
        log.warning("stopped: %s; %s", stop.reason, way_on)
        # A launcher ends the other processes when one leaves with an error, rank 0 while it still tidies up.
        return EXIT_STOPPED if getattr(rank_zero_only, "rank", 0) == 0 else EXIT_COMPLETED


def text_of_error(error: Exception) -> str:
    """What an error says, of one about a path without the system's number for it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error).strip()
