"""All ranks reach the same verdict, also about a fault that only one of them saw."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from genlight.reporters.telemetry import read_events
from support.rank_processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of several short trainings, and the faults that each rank reported."""
    folder = tmp_path_factory.mktemp("diagnosis")
    run_ranks("diagnosis_ranks.py", folder)
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_every_rank_has_the_same_verdict_and_only_rank_zero_writes_it(outcomes) -> None:
    folder, (first, second) = outcomes
    assert first == second
    for name, faults in first.items():
        written = read_events(folder / f"{name}.jsonl")
        assert [event["artifacts"]["fault"] for event in written] == list(faults)


@pytest.mark.parametrize("module", ["contract", "plain"])
def test_the_planted_faults_are_reported(outcomes, module: str) -> None:
    _, (found, _) = outcomes
    text, _, figures = found[f"{module} sleeps"]["straggler"]
    assert figures["rank"] == 1
    assert figures["host"] == platform.node()
    assert figures["step_seconds"] >= 0.25
    assert text.startswith(f"rank 1 on {platform.node()} takes")

    assert found[f"{module} nan"]["nonfinite_loss"][2]["first_step"] == 1
    assert found[f"{module} nan"]["nonfinite_gradients"][1] == 6

    assert found[f"{module} shared"]["repeated_data"][0] == "all ranks train on the same batch"

    for fault in ("none", "nan", "sleeps"):  # each rank has its own data
        assert "repeated_data" not in found[f"{module} {fault}"]


def test_sharded_parameters_are_named_on_all_ranks(outcomes) -> None:
    _, (found, _) = outcomes
    assert set(found["sharded nan"]) == {"nonfinite_loss", "nonfinite_gradients"}
    assert found["sharded nan"]["nonfinite_gradients"][2]["count"] == 4
