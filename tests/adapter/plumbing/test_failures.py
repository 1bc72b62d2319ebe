"""The text of a failure: its content, and values that it never contains."""

import pytest

from genlight.adapter.contract.exceptions import (
    EventLogError,
    InputError,
    TrainingCanceled,
    UsageError,
)
from genlight.adapter.plumbing.failures import describe_failure, error_to_report, safe_text, stop_reason


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
    ("error", "category", "code"),
    [
        (OSError("upload token"), "setup", 1),
        (ValueError("canceled"), "setup", 1),
        (TrainingCanceled("x"), "canceled", 75),
    ],
)
def test_category_and_exit_code_depend_on_the_type_and_not_on_the_text(error, category, code):
    """Every type is tested in ``tests/adapter/run/test_session_ends.py``."""
    failure = describe_failure(error, has_checkpoint=True, stage="setup")
    assert (failure.category, failure.exit_code, failure.resumable) == (category, code, True)


def chained(error, cause, *, is_cause=True):
    error.__cause__, error.__context__ = (cause, None) if is_cause else (None, cause)
    return error


LOST = "DataLoader worker (pid 7) is killed by signal: Terminated"
STOPS = {
    "ctrl-c in lightning": (chained(SystemExit(1), KeyboardInterrupt(), is_cause=False), {}, "canceled"),
    "a failure after the save": (chained(ValueError(), TrainingCanceled("timeout")), {"is_saved": True}, "timeout"),
    "a failure before the save": (chained(ValueError(), TrainingCanceled("timeout")), {}, None),
    "a worker that got the signal": (RuntimeError(LOST), {"signalled": "preempted"}, "preempted"),
    "a worker without a signal": (RuntimeError(LOST), {}, None),
    "a failure after the signal": (RuntimeError("own"), {"signalled": "preempted"}, None),
}


@pytest.mark.parametrize(("error", "facts", "reason"), STOPS.values(), ids=STOPS)
def test_a_failure_that_a_stop_caused_or_followed_is_reported_as_the_stop(error, facts, reason):
    assert stop_reason(error_to_report(error, **facts)) == reason


def raised_by(module, error):
    """The error as code of `module` raises it."""
    try:
        exec("def fails(): raise error", namespace := {"__name__": module, "error": error})
        eval(compile("fails()", "<reader>", "eval"), {**namespace, "__name__": "genlight.reader"})
    except Exception as raised:
        raised.__traceback__ = raised.__traceback__.tb_next
        return raised


@pytest.mark.parametrize(
    ("module", "error", "is_refused"),
    [
        ("lightning.pytorch.x", ValueError("x"), True),
        ("genlight.x", FileNotFoundError(2, "none", "x"), True),
        ("genlight.x", EventLogError("x"), True),
        ("genlight.x", OSError(28, "full", "x"), False),
        ("genlight.x", RuntimeError("x"), False),
        ("users_module", ValueError("x"), False),
    ],
)
def test_only_a_wrong_input_that_genlight_or_lightning_refuses_is_a_usage_error(module, error, is_refused):
    error = raised_by(module, error)
    assert isinstance(error_to_report(error, refuse=lambda each: UsageError(str(each))), UsageError) is is_refused
    assert error_to_report(error) is error
