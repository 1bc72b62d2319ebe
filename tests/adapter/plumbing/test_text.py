"""Texts of messages: suggested names, sizes, and strings that cannot be stored."""

import pytest

from genlight.adapter.plumbing.text import closest, is_storable, is_utf8, nearest, size_text


def test_the_nearest_name_is_suggested_unless_it_is_too_different():
    assert nearest("max_step", ["max_steps", "run_id"]) == " Did you mean `max_steps`?"
    assert nearest("zzz", ["max_steps"]) == ""
    assert closest("colour", iter(["color", "size"])) == "color"
    assert closest("colour", ["color"], alike=0.99) is None


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e6, "2.5 MB"), (3.2e9, "3.2 GB"), (5e15, "5000.0 TB")],
)
def test_a_size_has_decimal_units(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("text", "utf8", "storable"),
    [("path/ü", True, True), ("", True, True), ("\ud800", False, False), ("a\0", False, False), ("a\n", True, False)],
)
def test_strings_that_cannot_be_encoded_or_stored_are_recognized(text, utf8, storable):
    assert (is_utf8(text), is_storable(text)) == (utf8, storable)
