"""Repeat operations that failed for a reason that may pass."""

from __future__ import annotations

import email.utils
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

T = TypeVar("T")

LONGEST_RETRY_AFTER_S = 3600.0
TRANSIENT_STATUS = frozenset({408, 425, 429})


class TransientError(Exception):
    """A failure that may pass.

    Args:
        reason: Safe text for the operator.
        retry_after_s: Seconds that the server asked to wait, or None.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts and pauses between them."""

    attempts: int = 6
    """Attempts in a row without progress."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    longest_retry_after_s: float = 120.0
    """The longest wait that a server may ask for."""

    def delay_s(self, failures: int, asked_s: float | None) -> float:
        """Return the seconds before the next attempt, after `failures` (1 or more) in a row.

        The delay doubles with each failure, up to the longest. A random factor from 0.5 to 1 keeps many runs that lost
        the same server from returning at the same time.
        """
        delay = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 30))
        delay *= random.Random().uniform(0.5, 1.0)  # its own generator: training draws from the global one
        return max(delay, min(asked_s or 0.0, self.longest_retry_after_s))


def with_retries(
    attempt: Callable[[], T],
    policy: RetryPolicy,
    wait: Callable[[float], object],
    *,
    progressed: Callable[[], bool] = lambda: False,
) -> T:
    """Call `attempt` until it returns; return its result.

    Args:
        attempt: Raises `TransientError` if another attempt may succeed.
        policy: Number of attempts, and pauses between them.
        wait: Waits for a number of seconds; an exception from it ends the attempts.
        progressed: Whether the failed attempt made progress; the count of failures then starts again.

    Raises:
        TransientError: The last one, after `policy.attempts` failures in a row.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except TransientError as error:
            failures = 1 if progressed() else failures + 1
            if failures >= policy.attempts:
                raise
            asked_s = error.retry_after_s
        wait(policy.delay_s(failures, asked_s))


def transient_answer(status: int, headers: Mapping[str, str], reason: str) -> TransientError | None:
    """Return the error for an answer after which a later request may succeed; None for any other answer.

    Args:
        status: The HTTP status.
        headers: The headers of the answer. A date in ``Retry-After`` is compared with the server's clock, if the server
            sends its time: ours may be hours off.
        reason: Safe text for the operator.
    """
    if status not in TRANSIENT_STATUS and not 500 <= status <= 599:
        return None
    now = _parse_date(headers.get("Date", "")) or datetime.now(UTC)
    wait_s = retry_after_s(headers.get("Retry-After"), now)
    return TransientError(f"{reason} (Retry-After: {wait_s:.0f} s)" if wait_s else reason, wait_s)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Return the seconds of a ``Retry-After`` header (seconds or a date); None if absent or unreadable."""
    text = (value or "").strip()
    if text.isdecimal():
        return min(float(text), LONGEST_RETRY_AFTER_S)
    at = _parse_date(text)
    return None if at is None else min(max(0.0, (at - now).total_seconds()), LONGEST_RETRY_AFTER_S)


def _parse_date(text: str) -> datetime | None:
    """Return the date in a header; None if it is unreadable."""
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError, IndexError):  # an impossible year or time zone
        return None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at
