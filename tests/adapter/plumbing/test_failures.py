"""The text of a failure: its content, and values that it never contains."""

import pytest

from genlight.adapter.contract.exceptions import (
    AuthError,
    InputError,
    StartupContractError,
    TrainingCanceled,
    UploadError,
    UsageError,
)
from genlight.adapter.plumbing.failures import failure_category, safe_text, stop_reason


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\nlines"), "ValueError: two"),
        (ValueError(), "ValueError"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("GET https://me:p@ss@host:8/a/b?sig=1&x=2#f failed"), "ValueError: GET https://host:8/a/b failed"),
        (ValueError("('s3://key:secret@bucket/a',)"), "ValueError: ('s3://bucket/a',)"),
        (ValueError("in /home/me/data with TOKEN-123"), "ValueError: in $HOME/data with <hidden>"),
        (ValueError("is true"), "ValueError: is true"),
    ],
)
def test_a_text_keeps_useful_parts_and_drops_secrets(error, text):
    environ = {"HOME": "/home/me", "FLAG": "true"}
    assert safe_text(error, secrets=["TOKEN-123", ""], environ=environ) == text


def test_the_environment_of_the_process_is_hidden_by_default(monkeypatch):
    monkeypatch.setenv("API_KEY", "sk-123456")
    assert safe_text(ValueError("key sk-123456")) == "ValueError: key $API_KEY"


def test_a_long_text_is_cut():
    assert len(safe_text(ValueError("x" * 9999))) == 2000


def test_a_value_of_several_lines_is_hidden_completely():
    key = "-----BEGIN KEY-----\nc4nary1\nc4nary2\n-----END KEY-----"
    assert safe_text(InputError(f"bad key:\n{key}"), environ={"PEM": key}) == "bad key:; $PEM"
    assert safe_text(ValueError(f"bad key {key}"), environ={"PEM": key}) == "ValueError: bad key $PEM"


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (StartupContractError("startup.invalid_trainer", "x"), "startup"),
        (UsageError("x"), "startup"),
        (InputError("x"), "input"),
        (AuthError("x"), "auth"),
        (UploadError("x", auth=True), "auth"),
        (UploadError("x"), "upload"),
        (OSError("upload token"), None),
    ],
)
def test_the_category_depends_on_the_type_and_not_on_the_text(error, category):
    assert failure_category(error) == category


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TrainingCanceled("timeout"), "timeout"),
        (TrainingCanceled("preempted"), "preempted"),
        (TrainingCanceled("the user's own words"), "canceled"),
        (KeyboardInterrupt(), "canceled"),
        (ValueError("canceled"), None),
    ],
)
def test_a_stop_has_a_reason_and_a_failure_has_none(error, reason):
    assert stop_reason(error) == reason
