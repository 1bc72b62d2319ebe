"""Classes whose replicas used to drift agree with one process over the complete batch, or end with an error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from zoo import ddp_drift, runs

pytestmark = pytest.mark.promise(name="ranks")

TOLERANCE = runs.STEPS * runs.ROWS * torch.finfo(torch.float32).eps
"""Ranks add the rows of a step in a different order; this rounds each sum by at most one epsilon per row and step."""


def names(classes: Any) -> list[str]:
    return [f"zoo.ddp_drift:{cls.__name__}" for cls in classes]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all classes in one pair of processes, since starting one takes seconds."""
    every = names([*ddp_drift.RIGHT, *ddp_drift.DECLARED, *ddp_drift.REFUSED])
    return runs.on_two_ranks(tmp_path_factory.mktemp("drift"), [{"key": name, "name": name} for name in every])


@pytest.mark.slow
@pytest.mark.parametrize("name", names(ddp_drift.RIGHT))
def test_two_ranks_agree_with_one_process_and_bit_for_bit_with_each_other(
    outcomes: list[dict[str, Any]], name: str
) -> None:
    first, second = (rank[name] for rank in outcomes)
    assert not isinstance(first, str), first
    expected = runs.plain_run(name)
    assert first.keys() == second.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(first[key], second[key])
        difference = (first[key] - tensor).abs().max() / max(float(tensor.abs().max()), 1e-3)
        assert difference <= TOLERANCE, f"{key} differs by {difference:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("name", names(ddp_drift.DECLARED))
def test_declared_differences_stay_per_rank_and_everything_else_is_equal(
    outcomes: list[dict[str, Any]], name: str
) -> None:
    first, second = (rank[name] for rank in outcomes)
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    shared = [key for key in first if ".model." in key]
    assert shared
    assert all(torch.equal(first[key], second[key]) for key in shared)
    own = [key for key in first if ".memory." in key or ".latents" in key]
    assert own
    assert not any(torch.equal(first[key], second[key]) for key in own if first[key].shape == second[key].shape)


@pytest.mark.slow
@pytest.mark.parametrize("cls", ddp_drift.REFUSED)
def test_unsupported_class_ends_on_every_rank_with_place_and_cause(outcomes: list[dict[str, Any]], cls: Any) -> None:
    for rank in outcomes:
        outcome = rank[f"zoo.ddp_drift:{cls.__name__}"]
        assert isinstance(outcome, str), "trained to the end in silence"
        assert outcome.startswith(("ReplicaDriftError: after step ", "ContractError: "))
        assert re.search(ddp_drift.REFUSED[cls], outcome), outcome
