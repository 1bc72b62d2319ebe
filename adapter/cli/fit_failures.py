"""How ``genlight fit``, ``validate``, ``test`` and ``predict`` tell what ended them: as ``genlight run`` does."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl

from ...callbacks.hook.events import callbacks_of, run_state_of
from ...callbacks.stop.signals import exit_on_signal
from ...callbacks.stop.stop_requests import StopRequests
from ..contract.exceptions import FailureCategory, TrainingCanceled
from ..plumbing.failures import EXIT_STOPPED, describe_failure
from ..run.outcome import log_failure
from ..run.traceback_report import FAILURES_DIRECTORY

__all__ = ["FailureReport", "UnusableConfigurationError", "outlast_rank_zero", "text_of_error"]

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
        return EXIT_STOPPED


def outlast_rank_zero(trainer: pl.Trainer) -> None:
    """On another rank, after a stop: stay until rank zero has ended, which a launcher that sees an error may end."""
    if trainer.is_global_zero or run_state_of(trainer).stop_reason is None:
        return
    exit_on_signal(EXIT_STOPPED)  # this rank is done
    for callback in callbacks_of(trainer):
        if isinstance(callback, StopRequests):
            callback.outlast_rank_zero()
            return


def text_of_error(error: Exception) -> str:
    """What an error says, of one about a path without the system's number for it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error).strip()
