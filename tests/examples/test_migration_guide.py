"""The migration guide: each starting point trains here, and is proved to train as it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlight.reporters import read_events
from support.snippets import blocks, run_snippets

GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "migration.md"


@pytest.mark.slow
def test_every_command_of_the_guide_ends_well_and_compares_equal(tmp_path):
    """All comparisons of the guide exit with 0; with ``--rtol 0`` that means equal bits."""
    assert run_snippets(GUIDE, tmp_path) == 9

    for name in ("worker", "six"):
        events = list(read_events(tmp_path / "runs" / name / "metrics" / "events.jsonl"))
        assert events[-1]["event"] == "completed"


def test_each_starting_point_has_a_section_with_a_command():
    sections = GUIDE.read_text().split("\n## ")[1:5]

    assert [section.splitlines()[0] for section in sections] == [
        "From the gen_worker runtime",
        "From a plain loop",
        "From a LightningModule",
        "From six-hook trainers",
    ]
    assert all("```sh\ngenlight " in section for section in sections)
    assert {language for language, _, _ in blocks(GUIDE)} == {"python", "json", "sh"}
