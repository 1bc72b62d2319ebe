"""What to do after a failed transfer: try again, and when, or give up."""

from __future__ import annotations

import email.utils
import random
from collections.abc import Mapping
from datetime import UTC, datetime

__all__ = [
    "Contradicted",
    "Interrupted",
    "Refused",
    "TryAgain",
    "backoff_s",
    "is_transient",
    "outcome_of_status",
    "retry_after_s",
]

LONGEST_RETRY_AFTER_S = 3600.0
TRANSIENT_STATUS = frozenset({408, 425, 429})


class TryAgain(Exception):
    """The transfer failed in a way that may pass.

    Args:
        reason: Safe text for the operator.
        retry_after_s: Seconds that the server asked to wait; None when it did not.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Contradicted(TryAgain):
    """What the store says it received is not what was sent; a repetition is worth little."""


class Refused(Exception):
    """The transfer cannot succeed by repetition.

    Args:
        reason: Safe text for the operator.
        auth: Whether the server refused our credentials.
    """

    def __init__(self, reason: str, *, auth: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.auth = auth


class Interrupted(Exception):
    """The uploader is closing; the transfer goes on at the next start."""


def is_transient(status: int) -> bool:
    """Whether a request that was answered with `status` may succeed later."""
    return status in TRANSIENT_STATUS or 500 <= status <= 599


def outcome_of_status(
    status: int, headers: Mapping[str, str], where: str, *, advice: str = ""
) -> TryAgain | Refused | None:
    """None for success, else what to raise.

    Args:
        status: The status of the answer.
        headers: Its headers.
        where: The safe URL that goes into the reason.
        advice: What to do about refused credentials.
    """
    if 200 <= status <= 299:
        return None
    reason = f"HTTP {status} from {where}"
    if is_transient(status):
        # By the server's own clock where it tells it: ours may be hours off.
        now = _parsed_date(headers.get("Date", "")) or datetime.now(UTC)
        return TryAgain(reason, retry_after_s(headers.get("Retry-After"), now))
    if status in (401, 403):
        return Refused(f"{reason}; {advice}" if advice else reason, auth=True)
    return Refused(reason)


def backoff_s(failures: int, base_s: float, cap_s: float, rng: random.Random) -> float:
    """Seconds to wait after the given number of consecutive failures (1 or more).

    Doubles from `base_s` to `cap_s`; the upper half is random, so that many runs that lost the same server do not
    come back in step.
    """
    whole = min(cap_s, base_s * 2.0 ** min(failures - 1, 30))
    return whole * (0.5 + 0.5 * rng.random())


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Seconds in a ``Retry-After`` header, which holds seconds or a date; None when absent or unreadable."""
    if not value:
        return None
    text = value.strip()
    if text.isdecimal():
        return min(float(text), LONGEST_RETRY_AFTER_S)
    at = _parsed_date(text)
    return None if at is None else min(max(0.0, (at - now).total_seconds()), LONGEST_RETRY_AFTER_S)


def _parsed_date(text: str) -> datetime | None:
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError, IndexError):  # of a year, or a zone, that no calendar has
        return None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at
