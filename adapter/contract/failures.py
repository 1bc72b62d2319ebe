"""What an exception means for the operator: a category, a text that is safe to show, an exit code."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from .event_error import failure_category, safe_text, stop_reason
from .exceptions import FailureCategory, StopReason, TrainingCanceled

__all__ = [
    "EXIT_COMPLETED",
    "EXIT_FAILED",
    "EXIT_STARTUP",
    "EXIT_STOPPED",
    "Failure",
    "describe_failure",
    "stop_before",
    "stop_behind_lost_worker",
]

log = logging.getLogger(__name__)

EXIT_COMPLETED: Final = 0
EXIT_FAILED: Final = 1
EXIT_STARTUP: Final = 2
"""A startup error, or wrong usage of the command line."""
EXIT_STOPPED: Final = 75
"""Cancelled, timed out or preempted: a restart goes on where it stopped (``EX_TEMPFAIL`` of sysexits.h)."""


@dataclass(frozen=True)
class Failure:
    """How a run that did not complete is reported."""

    category: FailureCategory | StopReason
    text: str
    """``category:safe text``, or the reason of a stop."""
    resumable: bool
    """Whether the same start again goes on from a checkpoint."""
    exit_code: int


def describe_failure(
    error: BaseException,
    *,
    has_checkpoint: bool,
    stage: FailureCategory = "train-step",
    secrets: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Failure:
    """Tell a failure by what was raised and when.

    Args:
        error: What ended the run.
        has_checkpoint: Whether a restart finds a checkpoint.
        stage: What was going on: the category of an exception whose type tells nothing.
        secrets: Texts that must not be shown.
        environ: Environment whose values must not be shown; None takes the process's own.
    """
    reason = stop_reason(error)
    if reason is not None:
        return Failure(reason, reason, resumable=True, exit_code=EXIT_STOPPED)
    category = failure_category(error)
    if category == "train-step":
        category = stage
    text = safe_text(error, secrets=secrets, environ=os.environ if environ is None else environ)
    exit_code = EXIT_STARTUP if category == "startup" else EXIT_FAILED
    return Failure(
        category, f"{category}:{text}", resumable=has_checkpoint and category != "startup", exit_code=exit_code
    )


_LOST_WORKER: Final = re.compile(
    r"DataLoader worker \(pid.*\) "
    r"(is killed by signal: (Terminated|Interrupt|User defined signal 1)|exited unexpectedly)"
)


def _is_lost_worker(error: BaseException) -> bool:
    """Whether a torch data loader lost a worker to a signal; torch says so in words alone."""
    return any(isinstance(part, RuntimeError) and _LOST_WORKER.search(str(part)) for part in _chain(error))


def stop_behind_lost_worker(error: BaseException, reason: StopReason | None) -> TrainingCanceled | None:
    """The stop for `reason` whose signal ended a data worker before the step was done, and says so; None otherwise."""
    if reason is None or not _is_lost_worker(error):
        return None
    log.warning("the stop signal ended a data worker first, so no checkpoint of this step was saved")
    return TrainingCanceled(reason)


def stop_before(error: BaseException) -> TrainingCanceled | None:
    """The stop during whose handling a failure arose; None where there is none."""
    return next((part for part in _chain(error) if isinstance(part, TrainingCanceled)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from or in the handling of."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        yield current
        seen.append(current)
        current = current.__cause__ or current.__context__
