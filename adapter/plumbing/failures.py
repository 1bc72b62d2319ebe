"""Describe an exception for the operator: category, safe text, whether a restart resumes, exit code.

Only `describe_failure` decides, for the event log, the terminal payload, the command line and notes of ranks.
`unsupported_system` refuses systems other than Linux.
"""

from __future__ import annotations

import platform
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
from .redaction import hide_environment, safe_str
from .text import shortened

EXIT_COMPLETED: Final = 0
EXIT_FAILED: Final = 1
EXIT_STARTUP: Final = 2
"""A startup error, or wrong usage of the command line."""
EXIT_NONFINITE: Final = 3
"""A loss, gradient or weight became nan or infinite, and the job stops then: a restart would meet it again."""
EXIT_STOPPED: Final = 75
"""Canceled, timed out or preempted: a restart continues from there (``EX_TEMPFAIL`` of sysexits.h)."""

_LONGEST_TEXT = 2000


@dataclass(frozen=True)
class Failure:
    """The report of a run that did not complete."""

    category: FailureCategory | StopReason
    text: str
    """``category:safe text``, or the reason of a stop."""
    resumable: bool
    """Whether the same command, repeated, continues from a checkpoint."""
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
    """Classify a failure by its exception and stage. Never raises, whatever the exception's own methods do.

    Args:
        error: The exception that ended the run.
        has_checkpoint: Whether a restart finds a checkpoint.
        lost_steps: Whether steps may be in no checkpoint, so that even a stop cannot be resumed without one.
        stage: The activity that failed; it is the category of exceptions whose type does not decide.
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
    """Return the text of an exception without values that must not leave the machine; see `hide_environment`.

    genlight's own exceptions give all their lines, joined; others give their type and first line.
    """
    # Hide first, while values of several lines are intact.
    said = hide_environment(safe_str(error), secrets=tuple(secrets), environ=environ)
    lines = [line.strip() for line in said.strip().splitlines()]
    if lines and isinstance(error, GenlightError):
        text = "; ".join(line.removeprefix("- ") for line in lines)
    else:
        text = ": ".join([type(error).__name__, *lines[:1]])
    return shortened(text, _LONGEST_TEXT)


def failure_category(error: BaseException) -> FailureCategory | None:
    """Return the category that the exception's type decides, or None."""
    if isinstance(error, StartupContractError | HookOrderError | UsageError):
        return "startup"
    if isinstance(error, UploadError):
        return "auth" if error.auth else "upload"
    if isinstance(error, InputError):
        return "auth" if isinstance(error, AuthError) else "input"
    return None


def stop_reason(error: BaseException) -> StopReason | None:
    """Return the reason of a stop; None for a failure."""
    if isinstance(error, TrainingCanceled):
        known: dict[str, StopReason] = {"timeout": "timeout", "preempted": "preempted"}
        return known.get(error.reason, "canceled")
    # Lightning can only have raised its own exception if it is loaded.
    lightning = sys.modules.get("lightning.pytorch.utilities.exceptions")
    if lightning is not None and isinstance(error, lightning.SIGTERMException):
        return "preempted"
    return "canceled" if isinstance(error, KeyboardInterrupt) else None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the chain of its causes and contexts."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        yield current
        seen.append(current)
        current = current.__cause__ or current.__context__


def modules_of(error: BaseException) -> list[str]:
    """Return the names of the modules in an error's traceback; the last one raised it."""
    return [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]


def unsupported_system(what: str) -> str | None:
    """Return why `what` cannot work on this operating system, or None."""
    if platform.system() == "Linux":
        return None
    return (
        f"{what} needs Linux and this system is {platform.system()}: it lacks /proc, by which processes are "
        "distinguished, and the file locks and syncs that checkpoints and event logs rely on. Run it on Linux, for "
        "example in a container or WSL 2."
    )


def require_linux(module: str) -> None:
    """Refuse to import `module` on other systems than Linux.

    Raises:
        ImportError: This is another system.
    """
    fault = unsupported_system(module)
    if fault is not None:
        raise ImportError(fault)
