"""A run that is killed at any moment of its recovery resumes to the same end as an uninterrupted run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import SUPPORT
from support.recovered import rungs_in

pytestmark = pytest.mark.promise(name="resume")


@pytest.mark.slow
def test_a_run_killed_during_or_after_its_recovery_ends_like_an_uninterrupted_one(tmp_path):
    program = [sys.executable, "-m", "support.recover_kills", tmp_path]
    subprocess.run(program, cwd=SUPPORT.parent, check=True, timeout=900)
    ends = {place.name: (place / "end").read_text().split()[0] for place in tmp_path.iterdir()}
    assert len(ends) >= 13  # GENLIGHT_LONG_FAULTS=1 kills at every moment
    assert {name for name, digest in ends.items() if digest != ends["peace"]} == set()
    rungs = ["skip", "lower_lr", "roll_back", "roll_back"]
    assert [what for _, what in rungs_in(tmp_path / "peace")] == [*rungs, "rate_restored", "recovered"]
