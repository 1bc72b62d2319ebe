"""Errors are collected, shown short, and hold no secret."""

import pytest

from genlight.adapter.job.sources import ConfigErrors
from genlight.adapter.plumbing.settings import Rule, refusal, render_value


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
    within_itself: list[object] = []
    within_itself.append(within_itself)
    assert render_value(within_itself) == "list"
