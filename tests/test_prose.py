"""Docstrings, comments and pages are plain English; `tests/prose.py` says which habits count and lists them."""

import prose
import pytest

MOST_IN_1000_WORDS = 3.0
"""A floor, and about the value of other well-written projects: a few findings are good English."""


@pytest.mark.parametrize("part", prose.PARTS)
def test_prose_has_few_habits_that_slow_a_reader_down(part: str) -> None:
    words, findings = prose.read_part(part)

    assert 1000 * len(findings) / words <= MOST_IN_1000_WORDS, "python tests/prose.py lists them"


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("Of a job file; a device would fill the memory.", "starts with a preposition or a relative pronoun"),
        ("None where there is none.", "where, for if or when"),
        ("The weights are those of rank 0.", "that of, those of"),
        ("A rank that is told ends.", "a passive that hides who speaks"),
        ("It returns what was read.", None),
        ("Return the number of rows.", None),
    ],
)
def test_findings_name_the_habit(tmp_path, text, habit) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'"""{text}"""\n')

    _, findings = prose.read([file])

    assert [found.habit for found in findings] == ([habit] if habit else [])
