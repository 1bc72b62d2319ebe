"""The meaning of an exception for the operator: a category, a safe text, whether to go on, an exit code.

`describe_failure` alone decides, for the event log, the terminal payload, the command line and notes of ranks.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ..contract.exceptions import (
    AuthError,
    FailureCategory,
    GenlightError,
    HookOrderError,
    InputError,
    NonfiniteError,
    StartupContractError,
    StopReason,
    TrainingCanceled,
    UploadError,
    UsageError,
)
from .redaction import hide_environment, text_of
from .text import shortened

__all__ = [
    "EXIT_COMPLETED",
    "EXIT_FAILED",
    "EXIT_NONFINITE",
    "EXIT_STARTUP",
    "EXIT_STOPPED",
    "Failure",
    "causes_of",
    "describe_failure",
    "modules_of",
    "stop_reason",
]

EXIT_COMPLETED: Final = 0
EXIT_FAILED: Final = 1
EXIT_STARTUP: Final = 2
"""A startup error, or wrong usage of the command line."""
EXIT_NONFINITE: Final = 3
"""A loss, gradients or weights became nan or infinite, and the run was to end then: a restart would meet it again."""
EXIT_STOPPED: Final = 75
"""Cancelled, timed out or preempted: a restart goes on where it stopped (``EX_TEMPFAIL`` of sysexits.h)."""

_LONGEST_TEXT = 2000


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
    lost_steps: bool = False,
    stage: FailureCategory = "train-step",
    secrets: Iterable[str | None] = (),
    environ: Mapping[str, str] | None = None,
) -> Failure:
    """Classify a failure by what was raised and when; raises nothing, whatever the exception's own methods do.

    Args:
        error: What ended the run.
        has_checkpoint: Whether a restart finds a checkpoint.
        lost_steps: Whether steps were done that no checkpoint may have kept, so that even a stop is not to be resumed
            without one.
        stage: What was going on: the category of an exception whose type says nothing.
        secrets: Texts that must not be shown.
        environ: Environment whose values must not be shown; None takes the process's own.
    """
    reason = stop_reason(error)
    if reason is not None:
        return Failure(reason, reason, resumable=has_checkpoint or not lost_steps, exit_code=EXIT_STOPPED)
    category = failure_category(error) or stage
    text = f"{category}:{safe_text(error, secrets=secrets, environ=environ)}"
    if category == "startup":
        return Failure(category, text, resumable=False, exit_code=EXIT_STARTUP)
    exit_code = EXIT_NONFINITE if isinstance(error, NonfiniteError) else EXIT_FAILED
    return Failure(category, text, resumable=has_checkpoint, exit_code=exit_code)


def safe_text(
    error: BaseException, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None
) -> str:
    """The text of an exception, without what must not leave the machine; see `hide_environment`.

    Of genlight's own exceptions all lines, as one; of others the type and the first line.
    """
    # Hidden first, while values of several lines are whole.
    said = hide_environment(text_of(error), secrets=tuple(secrets), environ=environ)
    lines = [line.strip() for line in said.strip().splitlines()]
    if lines and isinstance(error, GenlightError):
        text = "; ".join(line.removeprefix("- ") for line in lines)
    else:
        text = ": ".join([type(error).__name__, *lines[:1]])
    return shortened(text, _LONGEST_TEXT)


def failure_category(error: BaseException) -> FailureCategory | None:
    """Where a failure came from, as far as the exception's type says; None where it says nothing."""
    if isinstance(error, StartupContractError | HookOrderError | UsageError):
        return "startup"
    if isinstance(error, UploadError):
        return "auth" if error.auth else "upload"
    if isinstance(error, InputError):
        return "auth" if isinstance(error, AuthError) else "input"
    return None


def stop_reason(error: BaseException) -> StopReason | None:
    """Why the run was to stop; None for a failure."""
    if isinstance(error, TrainingCanceled):
        known: dict[str, StopReason] = {"timeout": "timeout", "preempted": "preempted"}
        return known.get(error.reason, "canceled")
    # Only where Lightning is loaded can it have raised its own.
    lightning = sys.modules.get("lightning.pytorch.utilities.exceptions")
    if lightning is not None and isinstance(error, lightning.SIGTERMException):
        return "preempted"
    return "canceled" if isinstance(error, KeyboardInterrupt) else None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from or in the handling of."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        yield current
        seen.append(current)
        current = current.__cause__ or current.__context__


def modules_of(error: BaseException) -> list[str]:
    """The names of the modules that an error went through, the one that raised it last."""
    return [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
