"""Transient failures are repeated with pauses, and given up after too many in a row."""

from __future__ import annotations

import pytest

from genlight.adapter.plumbing.retry import RetryPolicy, TransientError, with_retries
from support.messages import refusal

POLICY = RetryPolicy(attempts=3, first_delay_s=1.0, longest_delay_s=8.0, longest_retry_after_s=20.0)


def failing(*errors):
    """A call that raises each of `errors` in turn, and returns ``done`` then."""
    left = list(errors)

    def attempt():
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_it_waits_longer_after_each_failure_and_returns_what_the_attempt_does():
    waits = []
    assert with_retries(failing(TransientError("a"), TransientError("b")), POLICY, waits.append) == "done"
    assert 0.5 <= waits[0] <= 1.0 <= waits[1] <= 2.0


def test_the_last_failure_is_raised_and_says_how_many_there_were():
    waits = []
    with refusal(TransientError):
        with_retries(failing(*map(TransientError, "abcd")), POLICY, waits.append)
    assert len(waits) == 2


def test_a_failure_that_brought_something_counts_as_the_first_again():
    assert with_retries(failing(*map(TransientError, "abcdef")), POLICY, lambda _: None, progressed=lambda: True)


@pytest.mark.parametrize(("asked_s", "waited_s"), [(5.0, 5.0), (3600.0, 20.0)], ids=["within reason", "too long"])
def test_a_server_may_ask_for_a_longer_wait_within_limits(asked_s, waited_s):
    waits = []
    with_retries(failing(TransientError("busy", asked_s)), POLICY, waits.append)
    assert waits == [waited_s]


def test_any_other_error_is_raised_at_once_and_a_wait_may_end_the_attempts():
    def stop(_):
        raise KeyboardInterrupt

    with refusal(ValueError):
        with_retries(failing(ValueError("wrong")), POLICY, stop)
    with pytest.raises(KeyboardInterrupt):
        with_retries(failing(TransientError("a")), POLICY, stop)
