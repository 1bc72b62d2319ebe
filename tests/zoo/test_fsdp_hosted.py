"""Scalars, copies in lists, parts that are called alone, gradient hooks, shared modules and wrappers under FSDP 2."""

from __future__ import annotations

import pytest
import torch

from zoo import fsdp_hosted, runs

MODULE = "zoo.fsdp_hosted"
NAMES = list(fsdp_hosted.ZOO)
HALF = ("CentersMovedByHand", "HookedGradients", "OptimizerInBackward")
RESUMED = ("DiffusersEma", "Clip", "SharedEncoder", "Dino", "OptimizerInBackward")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [{"key": name, "name": f"{MODULE}:{name}", "strategy": "fsdp"} for name in NAMES]
    jobs += [{**job, "key": f"blocks {job['key']}", "policy": "Linear"} for job in jobs]
    jobs += [
        {"key": f"resumed {name}", "name": f"{MODULE}:{name}", "strategy": "fsdp", "interrupted": 2} for name in RESUMED
    ]
    jobs += [
        {"key": f"half {name}", "name": f"{MODULE}:{name}", "strategy": "fsdp", "precision": "16-mixed"}
        for name in HALF
    ]
    jobs += [{"key": "inner unit", "name": f"{MODULE}:ReturnsObject", "strategy": "fsdp", "policy": "Inner"}]
    return runs.on_two_ranks(tmp_path_factory.mktemp("hosted"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["", "blocks "])
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name, policy):
    for rank in two_ranks:
        runs.assert_close(rank[f"{policy}{name}"], runs.plain_run(f"{MODULE}:{name}"), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_bit_equal_to_one_that_went_through(two_ranks, name):
    for rank in two_ranks:
        actual, expected = rank[f"resumed {name}"], rank[name]
        assert not isinstance(actual, str), actual
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
def test_in_fp16_they_agree_within_its_rounding(two_ranks, name):
    for rank in two_ranks:
        actual = rank[f"half {name}"]
        assert not isinstance(actual, str), actual
        actual = dict(actual)
        assert actual.pop("overflow_steps") == 0
        runs.assert_close(actual, runs.plain_run(f"{MODULE}:{name}"), 0.02)


@pytest.mark.slow
def test_a_unit_of_the_policy_whose_output_torch_cannot_see_is_refused_with_the_way_out(two_ranks):
    for rank in two_ranks:
        assert "returns no tensor that torch finds" in rank["inner unit"]
        assert "leave its class out of the shard policy" in rank["inner unit"]
