"""Separately called parts, copies, hooks, shared modules and wrappers under FSDP 2: correct, or refused."""

from __future__ import annotations

import re

import pytest
import torch

from zoo import fsdp_hosted, runs

pytestmark = pytest.mark.promise(name="ranks")

MODULE = "zoo.fsdp_hosted"
OUTPUTS = r"torch has no such operation on sharded parameters"
REFUSED = {
    "Codebook": r'state\["model"\], its codes: a module writes to its own parameters in its forward',
    "ReturnsObject": OUTPUTS,
    "ReturnsView": OUTPUTS,
    "NamesInputsOfBackward": r"gradients of parameters are requested",
}
RIGHT = [name for name in fsdp_hosted.ZOO if name not in REFUSED]
RESUMED = ("Clip", "AveragesInWholeModules")
SET = {
    "parts that are units": ("EncoderPart", {"units": ["Sequential"]}),
    "blocks": ("Clip", {"units": ["Linear"]}),
    "kept for backward": ("ModuleListOfBlocks", {"reshard_after_forward": False}),
    "kept for a look at features": ("FeaturesOfAHook", {"reshard_after_forward": False}),
    "some stay whole": ("ModuleListOfBlocks", {"ignored": ["1.*"]}),
    "each rank has all": ("ModuleListOfBlocks", {"replicas": 2}),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    def job(name, **more):
        return {"name": f"{MODULE}:{name}", "strategy": "fsdp", **more}

    jobs = [job(name, key=name) for name in fsdp_hosted.ZOO]
    jobs += [job(name, key=f"resumed {name}", interrupted=2) for name in RESUMED]
    jobs += [job(name, key=key, sharding=sharding) for key, (name, sharding) in SET.items()]
    return runs.on_two_ranks(tmp_path_factory.mktemp("hosted"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name):
    for rank in two_ranks:
        runs.assert_close(rank[name], runs.plain_run(f"{MODULE}:{name}"), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_class_is_refused_with_a_remedy(two_ranks, name):
    for rank in two_ranks:
        assert re.search(REFUSED[name], rank[name]), rank[name]
        assert "or use `strategy: ddp`" in rank[name]


@pytest.mark.slow
@pytest.mark.parametrize("key", SET)
def test_settings_change_the_sharding_and_not_the_training(two_ranks, key):
    for rank in two_ranks:
        runs.assert_close(rank[key], runs.plain_run(f"{MODULE}:{SET[key][0]}"), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_is_bit_equal_to_an_uninterrupted_one(two_ranks, name):
    for rank in two_ranks:
        actual, expected = rank[f"resumed {name}"], rank[name]
        assert not isinstance(actual, str), actual
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
