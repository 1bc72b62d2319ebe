"""Errors are collected, shown short, and hold no secret."""

import pytest

from genlight.adapter.job.sources import CODES, ConfigErrors
from genlight.adapter.plumbing.settings import Rule, refusal, render_value


def test_without_a_fault_there_is_no_error():
    errors = ConfigErrors()
    errors.warn("odd")
    assert errors.exception() is None


def test_the_error_has_the_code_that_is_documented_first_and_names_the_others_by_line():
    errors = ConfigErrors()
    errors.add("late", code="startup.missing_capability_token")
    errors.add(refusal("max_steps", Rule("an integer >= 1"), 0), name="max_steps")
    error = errors.exception()
    assert error is not None
    assert error.code == "startup.invalid_job_spec"
    assert str(error) == (
        "startup.invalid_job_spec: 2 errors\n"
        "  - startup.missing_capability_token: late\n"
        "  - Invalid `max_steps`. Expected an integer >= 1, but received 0."
    )


def test_a_single_fault_is_the_message():
    errors = ConfigErrors()
    errors.add("no trainer", code="startup.missing_trainer_import")
    assert str(errors.exception()) == "startup.missing_trainer_import: no trainer"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        (None, "null"),
        ("a\n\x1b[31m", '"a\\n\\u001b[31m"'),
        ("http://u:p@h/x?y=z", '"http://h/x"'),
        ("x" * 200, "a value of 202 characters"),
        (float("nan"), "NaN"),
    ],
)
def test_a_value_is_shown_short_on_one_line_and_without_credentials(value, shown):
    assert render_value(value) == shown


def test_a_value_that_contains_itself_is_still_shown():
    loop: list[object] = []
    loop.append(loop)
    assert render_value(loop) == "list"


def test_every_settings_code_of_the_contract_is_known():
    assert set(CODES) == {
        *("startup.missing_job_spec_path", "startup.missing_trainer_import", "startup.invalid_artifact_paths"),
        *("startup.invalid_timeout", "startup.missing_capability_token", "startup.invalid_job_spec"),
    }
