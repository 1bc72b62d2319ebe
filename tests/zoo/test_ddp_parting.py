"""Ranks that go different ways through a step are kept together, or ended with rank, parameter and line."""

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
load("ddp_drift")
ddp_parting = load("ddp_parting")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = [f"ddp_parting:{cls.__name__}" for cls in (*ddp_parting.RIGHT, *ddp_parting.REFUSED)]
    return two_ranks.on_two_ranks(tmp_path_factory.mktemp("parting"), names)


@pytest.mark.slow
@pytest.mark.parametrize("cls", ddp_parting.RIGHT)
def test_ranks_that_may_go_different_ways_agree_with_one_process(together: list[dict[str, Any]], cls: Any) -> None:
    name = f"ddp_parting:{cls.__name__}"
    first, second = (rank[name] for rank in together)
    assert not isinstance(first, str), first
    for key, tensor in two_ranks.plain(name).items():
        assert torch.equal(first[key], second[key])
        assert torch.allclose(first[key], tensor, rtol=0, atol=1e-6 * max(float(tensor.abs().max()), 1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("cls", ddp_parting.REFUSED)
def test_ranks_that_part_ways_are_ended_together_with_rank_parameter_and_line(
    together: list[dict[str, Any]], cls: Any
) -> None:
    for rank in together:
        outcome = rank[f"ddp_parting:{cls.__name__}"]
        assert isinstance(outcome, str), "trained to the end in silence"
        assert re.search(ddp_parting.REFUSED[cls], outcome), outcome
