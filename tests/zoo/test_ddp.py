"""Classes whose replicas could differ agree with one process under DDP, or end with rank, place and cause."""

import json
import re
import signal

import pytest
import torch

from support.rank_processes import run_ranks_to_their_ends
from zoo import ddp_drift, ddp_parting, runs

pytestmark = pytest.mark.promise(name="ranks")

TOLERANCE = runs.STEPS * runs.ROWS * torch.finfo(torch.float32).eps
"""Ranks add the rows of a step in a different order; this rounds each sum by at most one epsilon per row and step."""
MODULES = {module.__name__: module for module in (ddp_drift, ddp_parting)}
RIGHT = [f"{path}:{name}" for path, module in MODULES.items() for name in module.RIGHT] + ["zoo.fsdp_hosted:AddsALayer"]
DECLARED = [f"zoo.ddp_drift:{name}" for name in ddp_drift.DECLARED]
REFUSED = {f"{path}:{name}": text for path, module in MODULES.items() for name, text in module.REFUSED.items()}
SMALL_BUCKETS = [name for name in REFUSED if name.startswith("zoo.ddp_parting")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcomes of all classes from one pair of processes, since starting a pair takes seconds."""
    jobs = [{"key": name, "name": name} for name in (*RIGHT, *DECLARED, *REFUSED)]
    jobs += [{"key": f"small {name}", "name": name, "strategy": "small buckets"} for name in SMALL_BUCKETS]
    return runs.on_two_ranks(tmp_path_factory.mktemp("ddp"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_two_ranks_agree_with_one_process_and_bit_for_bit_with_each_other(outcomes, name):
    first, second = (rank[name] for rank in outcomes)
    runs.assert_close(first, runs.plain_run(name), TOLERANCE)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECLARED)
def test_declared_differences_stay_per_rank_and_everything_else_is_equal(outcomes, name):
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
@pytest.mark.parametrize("name", [*REFUSED, *(f"small {name}" for name in SMALL_BUCKETS)])
def test_diverged_or_unsupported_ranks_end_with_place_and_cause(outcomes, name):
    for rank in outcomes:
        assert isinstance(rank[name], str), "trained to the end in silence"
        assert rank[name].startswith(("ReplicaDriftError: after step ", "ContractError: "))
        assert re.search(REFUSED[name.removeprefix("small ")], rank[name]), rank[name]


@pytest.mark.slow
def test_rank_lost_in_an_exchange_is_reported_with_the_exchanged_parameter(tmp_path):
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
