"""The text of an exception as an event may show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..plumbing.redaction import hide_environment
from .exceptions import (
    AuthError,
    FailureCategory,
    GenlightError,
    InputError,
    StartupContractError,
    StopReason,
    TrainingCanceled,
    UploadError,
)

__all__ = ["failure_category", "safe_text", "stop_reason"]

_LONGEST_TEXT = 2000


def safe_text(error: BaseException, *, secrets: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> str:
    """What an exception says, without what must not leave the machine; see `hide_environment`.

    Of genlight's own exceptions all lines, as one; of others the type and the first line.
    """
    known = tuple(secrets)
    said = hide_environment(str(error), secrets=known, environ=environ)  # while values of several lines are whole
    lines = [line.strip() for line in said.strip().splitlines()]
    if lines and isinstance(error, GenlightError):
        text = "; ".join(line.removeprefix("- ") for line in lines)
    else:
        text = ": ".join([type(error).__name__, *lines[:1]])
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


def failure_category(error: BaseException) -> FailureCategory:
    """Where a failure came from, as far as the exception's type tells; what tells nothing is ``train-step``."""
    if isinstance(error, StartupContractError):
        return "startup"
    if isinstance(error, AuthError) or (isinstance(error, UploadError) and error.auth):
        return "auth"
    if isinstance(error, InputError):
        return "input"
    return "upload" if isinstance(error, UploadError) else "train-step"


def stop_reason(error: BaseException) -> StopReason | None:
    """Why the run was told to stop; None for a failure."""
    if isinstance(error, TrainingCanceled):
        known: dict[str, StopReason] = {"timeout": "timeout", "preempted": "preempted"}
        return known.get(error.reason, "canceled")
    return "canceled" if isinstance(error, KeyboardInterrupt) else None
