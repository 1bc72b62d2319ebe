"""Addresses, keys, payloads and the patience of retries: pure functions."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.plumbing.retry import LONGEST_RETRY_AFTER_S, RetryPolicy, TransientError, retry_after_s
from genlight.reporters.uploads.destinations import (
    Refused,
    file_url,
    idempotency_key,
    outcome_of_status,
    remote_name,
)

KEY = "43f504f77ecb3a84a4a3e5051db1f5a3438fa5f3"
"""Written down once: another value would make servers that saw the old one apply an upload twice."""
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_the_address_of_a_file_follows_the_contract():
    name = remote_name(200, "trainer/lora.safetensors", final=False)
    assert name == "step-00000200-trainer_lora.safetensors"
    assert remote_name(200, "model.safetensors", final=True) == "final-model.safetensors"
    url = file_url("https://hub.example/base/", "me", "run-1", "checkpoint", name)
    assert url == f"https://hub.example/base/api/v1/file/v1/me/runs/run-1/checkpoints/{name}"
    assert "/samples/" in file_url("https://h", "me", "r", "sample", "x")


def test_a_query_of_the_store_stays_at_the_end_and_odd_characters_are_quoted():
    url = file_url("https://h/?sig=a/b", "a b", "../r?", "sample", "ü#")
    assert url == "https://h/api/v1/file/v1/a%20b/runs/..%2Fr%3F/samples/%C3%BC%23?sig=a/b"


def test_a_key_is_the_same_for_the_same_content_in_every_process():
    assert idempotency_key("r", "metrics", 1, "", "d") == KEY


ARGUMENTS = st.tuples(st.text(), st.sampled_from(["file", "metrics"]), st.integers(0, 3), st.text(), st.text())


@settings(max_examples=50)
@given(ARGUMENTS, ARGUMENTS)
def test_keys_differ_if_any_part_differs(one, other):
    assert len({idempotency_key(*one), idempotency_key(*other)}) == len({one, other})


def test_a_status_is_a_success_may_pass_or_is_final():
    for status in (200, 201, 202, 204, 299):
        assert outcome_of_status(status, {}, "x") is None
    for status in (408, 425, 429, 500, 502, 503, 504, 599):
        assert isinstance(outcome_of_status(status, {}, "x"), TransientError)
    for status in (300, 304, 400, 401, 403, 404, 409, 410, 418, 422, 499):
        outcome = outcome_of_status(status, {}, "https://h/x", advice="log in")
        assert isinstance(outcome, Refused)
        assert outcome.auth == (status in (401, 403))
        assert str(outcome) == f"HTTP {status} from https://h/x" + ("; log in" if outcome.auth else "")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("7", 7.0),
        (" 0 ", 0.0),
        ("-5", None),
        ("1e9", None),
        ("soon", None),
        ("99999999999", LONGEST_RETRY_AFTER_S),
        ("Fri, 02 Jan 2026 03:04:35 GMT", 30.0),
        ("Fri, 02 Jan 2026 03:04:35", 30.0),
        ("Fri, 02 Jan 2026 04:04:35 +0100", 30.0),
        ("Fri, 02 Jan 2026 03:00:00 GMT", 0.0),
    ],
)
def test_retry_after_holds_seconds_or_a_date(header, seconds):
    assert retry_after_s(header, NOW) == seconds


def test_the_back_off_doubles_up_to_its_cap_and_is_spread():
    policy = RetryPolicy(first_delay_s=0.5, longest_delay_s=60.0)
    for failures, whole in [(1, 0.5), (2, 1.0), (5, 8.0), (9, 60.0), (10_000, 60.0)]:
        drawn = [policy.delay_s(failures, None) for _ in range(50)]
        assert whole / 2 <= min(drawn) < max(drawn) <= whole
    assert RetryPolicy(first_delay_s=0.0).delay_s(1, None) == 0.0


def test_a_date_counts_from_the_clock_of_the_server_that_named_it():
    fast = {"Date": "Sat, 01 Jan 2050 00:00:00 GMT", "Retry-After": "Sat, 01 Jan 2050 00:00:07 GMT"}
    assert outcome_of_status(503, fast, "x").retry_after_s == 7.0
    slow = {"Date": "Thu, 01 Jan 2004 00:00:00 GMT", "Retry-After": "Thu, 01 Jan 2004 00:00:07 GMT"}
    assert outcome_of_status(503, slow, "x").retry_after_s == 7.0
    assert outcome_of_status(503, {"Date": "later", "Retry-After": "3"}, "x").retry_after_s == 3.0
