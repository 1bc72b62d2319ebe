"""Tokens and values of the environment are removed from texts."""

from __future__ import annotations

import pytest

from genlight.adapter.plumbing.redaction import hide_environment, hide_secrets, redact

pytestmark = pytest.mark.promise(name="security")

ENVIRON = {"API_KEY": "s3cret-key", "LONG": "x" * 20, "PWD": "/a/path/that/is/long", "LANG": "en_US.UTF-8", "KEY": "ab"}
SPELLED = 'ab"cd'


def test_secrets_are_replaced_longest_first_also_in_json_except_tiny_ones():
    assert redact('abcdef abcd "ab\\"cd"', ["abcd", "abcdef", SPELLED, "a", None]) == '<hidden> <hidden> "<hidden>"'


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("Bearer my-token!", "Bearer <hidden>!"),
        ("key s3cret-key", "key $API_KEY"),
        ("x" * 20, "$LONG"),
        ('File "/a/path/that/is/long/x.py"', 'File "/a/path/that/is/long/x.py"'),
        ("en_US.UTF-8 ab", "en_US.UTF-8 ab"),
        ("nothing", "nothing"),
        ("GET https://me:pw@host/path?sig=1 now", "GET https://host/path now"),
    ],
)
def test_a_log_keeps_paths_and_short_values(text, safe):
    assert hide_secrets(text, secrets=("my-token", None, ""), environ=ENVIRON) == safe


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ('File "/a/path/that/is/long/x.py"', 'File "$PWD/x.py"'),
        ("en_US.UTF-8 ab", "$LANG ab"),
        ("one two my-token", "one two <hidden>"),
    ],
)
def test_a_text_for_other_machines_has_no_value_of_the_environment_except_tiny_ones(text, safe):
    assert hide_environment(text, secrets=("my-token",), environ=ENVIRON) == safe


def test_a_value_that_contains_a_secret_is_hidden_completely():
    assert hide_environment("see user:my-token", secrets=["my-token"], environ={"A": "user:my-token"}) == "see $A"
