"""Transient failures are retried with pauses, up to a number of failures in a row."""

import pytest

from genlight.adapter.plumbing.retry import RetryPolicy, TransientError, with_retries
from support.messages import refusal

POLICY = RetryPolicy(attempts=3, first_delay_s=1.0, longest_delay_s=8.0, longest_retry_after_s=20.0)


def failing(*errors):
    """Return a function that raises each of `errors` in turn and then returns ``done``."""
    left = list(errors)

    def attempt():
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_waits_grow_after_each_failure_and_the_result_is_returned():
    waits = []
    assert with_retries(failing(TransientError("a"), TransientError("b")), POLICY, waits.append) == "done"
    assert 0.5 <= waits[0] <= 1.0 <= waits[1] <= 2.0


def test_the_last_failure_is_raised_with_the_number_of_attempts():
    waits = []
    with refusal(TransientError):
        with_retries(failing(*map(TransientError, "abcd")), POLICY, waits.append)
    assert len(waits) == 2


def test_a_failure_after_progress_counts_as_the_first():
    assert with_retries(failing(*map(TransientError, "abcdef")), POLICY, lambda _: None, progressed=lambda: True)


@pytest.mark.parametrize(("retry_after_s", "waited_s"), [(5.0, 5.0), (3600.0, 20.0)], ids=["short", "too long"])
def test_a_server_may_request_a_longer_wait_within_limits(retry_after_s, waited_s):
    waits = []
    with_retries(failing(TransientError("busy", retry_after_s)), POLICY, waits.append)
    assert waits == [waited_s]


def test_any_other_error_is_raised_at_once_and_a_wait_may_end_the_attempts():
    def stop(_):
        raise KeyboardInterrupt

    with refusal(ValueError):
        with_retries(failing(ValueError("wrong")), POLICY, stop)
    with pytest.raises(KeyboardInterrupt):
        with_retries(failing(TransientError("a")), POLICY, stop)
