"""Classes whose replicas used to drift apart agree with one process over the whole batch, or are ended by name."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def load(stem: str) -> Any:
    """A module of this folder, under its own name, by which the classes' files know each other."""
    spec = importlib.util.spec_from_file_location(stem, HERE / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return module


two_ranks = load("two_ranks")
ddp_drift = load("ddp_drift")

TOLERANCE = 1e-6


def names(classes: Any) -> list[str]:
    return [f"ddp_drift:{cls.__name__}" for cls in classes]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All classes in one pair of processes, since starting one takes seconds."""
    every = names([*ddp_drift.RIGHT, *ddp_drift.DECLARED, ddp_drift.MastersInBf16, *ddp_drift.REFUSED])
    return two_ranks.on_two_ranks(tmp_path_factory.mktemp("drift"), every)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(ddp_drift.RIGHT))
def test_two_ranks_agree_with_one_process_and_bit_for_bit_with_each_other(
    outcomes: list[dict[str, Any]], name: str
) -> None:
    first, second = (rank[name] for rank in outcomes)
    assert not isinstance(first, str), first
    expected = two_ranks.plain(name)
    assert first.keys() == second.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(first[key], second[key])
        difference = (first[key] - tensor).abs().max() / max(float(tensor.abs().max()), 1e-3)
        assert difference <= TOLERANCE, f"{key} differs by {difference:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("name", names(ddp_drift.DECLARED))
def test_what_is_declared_to_differ_is_each_ranks_own_and_the_rest_is_equal(
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
def test_masters_of_a_bf16_model_stay_equal_and_near_to_those_of_one_process(outcomes: list[dict[str, Any]]) -> None:
    name = "ddp_drift:MastersInBf16"
    first, second = (rank[name] for rank in outcomes)
    assert not isinstance(first, str), first
    for key, tensor in two_ranks.plain(name).items():
        assert torch.equal(first[key], second[key])
        assert torch.allclose(first[key].float(), tensor.float(), atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("cls", ddp_drift.REFUSED)
def test_what_cannot_be_made_right_is_ended_on_every_rank_with_the_tensor_its_values_and_the_cause(
    outcomes: list[dict[str, Any]], cls: Any
) -> None:
    for rank in outcomes:
        outcome = rank[f"ddp_drift:{cls.__name__}"]
        assert isinstance(outcome, str), "trained to the end in silence"
        assert outcome.startswith("ReplicaDriftError: after step ")
        assert re.search(ddp_drift.REFUSED[cls], outcome), outcome
