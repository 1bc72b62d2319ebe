"""Terms of weights in a loss, adjoints and averages in lists under FSDP 2: correct, or refused."""

from __future__ import annotations

import re

import pytest
import torch

from zoo import fsdp_weights, runs

pytestmark = pytest.mark.promise(name="ranks")

MODULE = "zoo.fsdp_weights"
REFUSED = {
    "PenaltyOnOneRank": r"rank 0 is about to call backward with gradients for norm of weights, rank 1 to call backward",
    "TrainsAnAlias": r"`\.data` of a sharded parameter was set to a full tensor, and later only one of the two",
    "WritesItsRank": r"rank 0 is about to write a full tensor to a sharded one of shape \(5, 6\)",
}
RIGHT = [name for name in fsdp_weights.ZOO if name not in REFUSED]
OTHERWISE = ("in_each_row", "norms", "adjoint", "adjoint_inside", "reversible_inside", "implicit_inside", "SwapsData")
KINDS = {"": {}, "units ": {"units": ["Linear"]}, "kept ": {"reshard_after_forward": False}, "each ": {"replicas": 2}}
CASES = [(kind, name) for kind in KINDS for name in (OTHERWISE if kind else RIGHT)]
RESUMED = ("zoo.optimizers:RowwiseAdagrad", "zoo.ema:EmaMadeInTheFirstStep", "zoo.ema:SwappedByData")
"""Their state is sharded and has another shape than a parameter, or belongs to no module and no optimizer."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [
        {"key": kind + name, "name": f"{MODULE}:{name}", "strategy": "fsdp", "sharding": KINDS[kind]}
        for kind, name in [*CASES, *(("", name) for name in REFUSED)]
    ]
    jobs += [{"key": name, "name": name, "strategy": "fsdp"} for name in RESUMED]
    jobs += [
        {**job, "key": f"resumed {job['key']}", "interrupted": 2, "durable": True} for job in jobs[-len(RESUMED) :]
    ]
    return runs.on_two_ranks(tmp_path_factory.mktemp("weights"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, kind, name):
    expected = runs.plain_run(f"{MODULE}:{name}")
    for rank in two_ranks:
        runs.assert_close(rank[kind + name], expected, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_class_is_refused_on_all_ranks(two_ranks, name):
    for rank in two_ranks:
        assert re.search(REFUSED[name], rank[name]), rank[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_is_bit_equal_to_an_uninterrupted_one(two_ranks, name):
    for rank in two_ranks:
        actual, expected = rank[f"resumed {name}"], rank[name]
        assert not isinstance(actual, str), actual
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
