"""All ranks take the same rungs, also if only one of them met the fault; a kill changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support import SUPPORT
from support.rank_processes import run_ranks
from support.recovered import rungs_in

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The folder of several short trainings, and the final state of each rank."""
    folder = tmp_path_factory.mktemp("recover")
    run_ranks("recover_ranks.py", folder)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_takes_the_same_rungs_at_the_same_steps(outcomes):
    folder, (first, second) = outcomes
    for name in first:
        assert first[name]["ladder"] == second[name]["ladder"], name
        assert first[name]["next"] == second[name]["next"], name
        assert first[name]["calls"] == second[name]["calls"], name
        assert first[name]["error"] == second[name]["error"], name
    assert rungs_in(folder / "nan")[:3] == [(13, "skip"), (14, "lower_lr"), (16, "roll_back")]


def test_a_resumed_run_of_several_ranks_ends_like_an_uninterrupted_one(outcomes):
    for rank in outcomes[1]:
        assert rank["nan"]["digest"] == rank["nan, resumed"]["digest"]


def test_a_high_loss_on_one_rank_skips_the_update_on_all(outcomes):
    folder, (first, second) = outcomes
    assert first["spike"]["ladder"]["taken"] == {"skip": 1}
    assert rungs_in(folder / "spike")[0] == (41, "skip")
    assert second["spike"]["error"] == ""


def test_a_sharded_model_can_skip_updates_and_a_roll_back_is_refused_at_the_start(outcomes):
    _, (first, second) = outcomes
    assert second["sharded"]["ladder"]["taken"] == {"skip": 1}
    assert first["sharded"]["error"] == ""
    assert "'roll_back' does not support sharded parameters" in first["sharded, refused"]["error"]


def test_a_ladder_that_is_used_up_ends_all_ranks(outcomes):
    _, (first, second) = outcomes
    assert "after 5 attempts since step 12" in first["used up"]["error"]
    assert second["used up"]["digest"] == ""


def test_a_run_killed_during_or_after_its_recovery_ends_like_an_uninterrupted_one(tmp_path):
    program = [sys.executable, "-m", "support.recover_kills", tmp_path]
    subprocess.run(program, cwd=SUPPORT.parent, check=True, timeout=900)
    ends = {place.name: (place / "end").read_text().split()[0] for place in tmp_path.iterdir()}
    assert len(ends) >= 13  # GENLIGHT_LONG_FAULTS=1 kills at every moment
    assert {name for name, digest in ends.items() if digest != ends["peace"]} == set()
    rungs = ["skip", "lower_lr", "roll_back", "roll_back"]
    assert [what for _, what in rungs_in(tmp_path / "peace")] == [*rungs, "rate_restored", "recovered"]
