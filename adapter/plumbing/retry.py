"""When to repeat what failed, and for how long."""

from __future__ import annotations

import email.utils
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

__all__ = ["RetryPolicy", "TransientError", "is_transient", "parsed_date", "retry_after_s", "with_retries"]

T = TypeVar("T")

LONGEST_RETRY_AFTER_S = 3600.0
TRANSIENT_STATUS = frozenset({408, 425, 429})


class TransientError(Exception):
    """Something failed in a way that may pass.

    Args:
        reason: Safe text for the operator.
        retry_after_s: Seconds that the server asked to wait; None when it did not.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and how patiently, to repeat what failed in a way that may pass."""

    attempts: int = 6
    """Attempts in a row without progress."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    longest_retry_after_s: float = 120.0
    """The longest wait that a server may ask for."""

    def delay_s(self, failures: int, asked_s: float | None) -> float:
        """Seconds before the next attempt, after so many failures in a row (1 or more).

        Doubles from the first delay to the longest; the upper half is random, so that many runs that lost the same
        server do not come back in step.
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
    """The result of `attempt`, as soon as it has one.

    Args:
        attempt: Raises `TransientError` for what is worth another attempt.
        policy: How many attempts, and how long to wait between them.
        wait: Waits for a number of seconds; what it raises ends the attempts.
        progressed: Whether the attempt that failed brought something; it is then counted as the first failure again.

    Raises:
        TransientError: The last one, once there were `policy.attempts` in a row.
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


def is_transient(status: int) -> bool:
    """Whether a request that was answered with `status` may succeed later."""
    return status in TRANSIENT_STATUS or 500 <= status <= 599


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Seconds in a ``Retry-After`` header, which holds seconds or a date; None when absent or unreadable."""
    if not value:
        return None
    text = value.strip()
    if text.isdecimal():
        return min(float(text), LONGEST_RETRY_AFTER_S)
    at = parsed_date(text)
    return None if at is None else min(max(0.0, (at - now).total_seconds()), LONGEST_RETRY_AFTER_S)


def parsed_date(text: str) -> datetime | None:
    """The date in a header; None where it is unreadable."""
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError, TypeError, IndexError):  # of a year, or a zone, that no calendar has
        return None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at
