"""Ranks that diverge within a step are kept together, or end with an error that names rank, parameter and line."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from support.rank_processes import run_ranks_to_their_ends
from zoo import ddp_parting, runs

pytestmark = pytest.mark.promise(name="ranks")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = [f"zoo.ddp_parting:{cls.__name__}" for cls in (*ddp_parting.RIGHT, *ddp_parting.REFUSED)]
    jobs = [{"key": name, "name": name} for name in names]
    jobs += [{"key": f"small buckets {name}", "name": name, "strategy": "small buckets"} for name in names]
    return runs.on_two_ranks(tmp_path_factory.mktemp("parting"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("cls", ddp_parting.RIGHT)
def test_ranks_that_may_diverge_agree_with_one_process(together: list[dict[str, Any]], cls: Any) -> None:
    name = f"zoo.ddp_parting:{cls.__name__}"
    first, second = (rank[name] for rank in together)
    assert not isinstance(first, str), first
    for key, tensor in runs.plain_run(name).items():
        assert torch.equal(first[key], second[key])
        assert torch.allclose(first[key], tensor, rtol=0, atol=1e-6 * max(float(tensor.abs().max()), 1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("buckets", ["", "small buckets "])
@pytest.mark.parametrize("cls", ddp_parting.REFUSED)
def test_diverged_ranks_end_with_rank_parameter_and_line(
    together: list[dict[str, Any]], cls: Any, buckets: str
) -> None:
    for rank in together:
        outcome = rank[f"{buckets}zoo.ddp_parting:{cls.__name__}"]
        assert isinstance(outcome, str), "trained to the end in silence"
        assert re.search(ddp_parting.REFUSED[cls], outcome), outcome


@pytest.mark.slow
def test_rank_lost_in_an_exchange_is_reported_with_the_exchanged_parameter(
    tmp_path: Path,
) -> None:
    job = {"key": "lost", "name": "zoo.ddp_parting:KilledInBackward", "strategy": "small buckets"}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))

    codes, _ = run_ranks_to_their_ends("zoo.runs", tmp_path, world_size=2, timeout_s=240, may_fail=[1])

    assert codes[1] == -signal.SIGKILL
    outcome = torch.load(tmp_path / "rank0.pt", weights_only=True)["lost"]
    assert re.search(
        r"RankFailedError: the exchange of gradients broke off in step 3, in which rank 0 calls backward "
        r"\(at .*ddp_parting\.py:\d+, in train_step\), "
        r'at the bucket of state\["model"\]\.\d\.\w+; rank 1 did not answer',
        outcome,
    ), outcome
