"""Failures that are a stop in truth, and how a failure is described."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Final

from ..plumbing.redaction import text_of
from .event_error import EXIT_COMPLETED, EXIT_FAILED, EXIT_STARTUP, EXIT_STOPPED, Failure, describe_failure
from .exceptions import StopReason, TrainingCanceled

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

_LOST_WORKER: Final = re.compile(
    r"DataLoader worker \(pid.*\) "
    r"(is killed by signal: (Terminated|Interrupt|User defined signal 1)|exited unexpectedly)"
)


def _is_lost_worker(error: BaseException) -> bool:
    """Whether a torch data loader lost a worker to a signal; torch says so in words alone."""
    return any(isinstance(part, RuntimeError) and _LOST_WORKER.search(text_of(part)) for part in _chain(error))


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
