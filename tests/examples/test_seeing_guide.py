"""The guide on seeing runs does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.snippets import run_snippets

GUIDE = Path(__file__).parents[2] / "examples" / "guides" / "seeing.md"


@pytest.mark.slow
def test_every_command_of_the_guide_ends_well(tmp_path):
    assert run_snippets(GUIDE, tmp_path) == 9
    page = (tmp_path / "seen.html").read_text()
    assert '"run_id": "slow"' in page
    assert '"run_id": "quick"' in page
