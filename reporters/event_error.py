"""The text of an exception as an event may show it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from ..adapter.exceptions import (
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

_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s'\"<>]+)", re.IGNORECASE)
_SHORTEST_VALUE = 6
_LONGEST_TEXT = 2000


def safe_text(error: BaseException, *, secrets: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> str:
    """What an exception says, without what must not leave the machine.

    Of genlight's own exceptions all lines, as one; of others the type and the first line.
    Values of environment variables appear as ``$NAME``, `secrets` as ``<hidden>``, and URLs without user info, query
    and fragment. Environment values of fewer than 6 characters stay: ``1`` or ``true`` are part of many texts.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if lines and isinstance(error, GenlightError):
        text = "; ".join(line.removeprefix("- ") for line in lines)
    else:
        text = ": ".join([type(error).__name__, *lines[:1]])
    hidden = dict.fromkeys(filter(None, secrets), "<hidden>")
    for name, value in (os.environ if environ is None else environ).items():
        if len(value) >= _SHORTEST_VALUE:
            hidden.setdefault(value, f"${name}")
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, hidden[value])
    text = _URL.sub(_without_credentials, text)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."


def _without_credentials(url: re.Match[str]) -> str:
    scheme, rest = url.groups()
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}{authority.rpartition('@')[2]}{slash}{path}"


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
