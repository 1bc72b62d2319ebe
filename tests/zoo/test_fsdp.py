"""Classes that are difficult to shard train right over two ranks under FSDP 2, or are refused with the way out."""

import re

import pytest
import torch

from zoo import fsdp_hosted, fsdp_stale_weights, fsdp_values, fsdp_weights, runs

pytestmark = pytest.mark.promise(name="ranks")

MODULES = {module.__name__: module for module in (fsdp_hosted, fsdp_stale_weights, fsdp_values, fsdp_weights)}
TOLERANCE = {"zoo.fsdp_weights": 2e-5, "zoo.fsdp_stale_weights": 1e-6}
"""Tolerance by module, relative to the largest value of a tensor."""
BLOCKS, KEPT, EACH = {"units": ["Linear"]}, {"reshard_after_forward": False}, {"replicas": 2}
FREED = {"reshard_after_forward": True}
RESNET = "zoo.fsdp_values:ResNet"
"""Its statistics of norms are those of each rank's rows, so it is compared with torch's DDP."""
ODD = [
    f"zoo.fsdp_weights:{name}"
    for name in (
        "in_each_row",
        "norms",
        "adjoint",
        "adjoint_inside",
        "reversible_inside",
        "implicit_inside",
        "SwapsData",
    )
]
STALE = [
    f"zoo.fsdp_stale_weights:{name}"
    for name in fsdp_stale_weights.ZOO
    if name not in fsdp_stale_weights.LOOKING or name.endswith("FirstZeroedForwardedBackwardedSteppedLast")
]
SHARDINGS = [
    *((name, settings) for settings in (BLOCKS, KEPT, FREED, EACH) for name in ODD),
    *((name, settings) for settings in (BLOCKS, KEPT, FREED) for name in STALE),
    ("zoo.self_supervised:Autoencoder", {"units": ["Sequential"]}),
    ("zoo.fsdp_hosted:Clip", BLOCKS),
    ("zoo.fsdp_hosted:ModuleListOfBlocks", KEPT),
    ("zoo.fsdp_hosted:FeaturesOfAHook", KEPT),
    ("zoo.fsdp_hosted:ModuleListOfBlocks", {"ignored": ["1.*"]}),
    ("zoo.fsdp_hosted:ModuleListOfBlocks", EACH),
]
RESUMED = {
    "zoo.fsdp_hosted:Clip": {},
    "zoo.fsdp_hosted:AveragesInWholeModules": {},
    # Their state is sharded and has another shape than a parameter, or belongs to no module and no optimizer.
    "zoo.optimizers:RowwiseAdagrad": {"durable": True},
    "zoo.ema:EmaMadeInTheFirstStep": {"durable": True},
    "zoo.ema:SwappedByData": {"durable": True},
}
EXPERTS = "zoo.fsdp_values:Experts"
REFUSED = {f"{path}:{name}": text for path, module in MODULES.items() for name, text in module.REFUSED.items()}
REFUSED_SETTINGS = [(f"zoo.fsdp_hosted:{name}", FREED) for name in ("ReturnsObject", "ReturnsView")]
"""Classes whose outputs torch does not see, so that backward does not gather weights that a forward has freed."""
RIGHT = [
    f"{path}:{name}"
    for path, module in MODULES.items()
    for name in module.ZOO
    if name not in module.REFUSED and f"{path}:{name}" != RESNET
]


def key_of(name, settings):
    return f"{name} with {settings}"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The outcomes of all classes from one pair of processes, since starting a pair takes seconds."""
    jobs = [{"key": name, "name": name} for name in dict.fromkeys((*RIGHT, RESNET, *RESUMED))]
    jobs += [{"key": key_of(name, settings), "name": name, "sharding": settings} for name, settings in SHARDINGS]
    refused = [{"key": key_of(*pair), "name": pair[0], "sharding": pair[1]} for pair in REFUSED_SETTINGS]
    jobs += [{"key": f"resumed {name}", "name": name, "interrupted": 2, **more} for name, more in RESUMED.items()]
    jobs += [{"key": "torch's ResNet", "name": RESNET, "strategy": "torch's own"}]
    jobs += [{"key": "unused", "name": EXPERTS, "sharding": {"unused_parameters": True}}]
    # All ranks get the error at the same point, so that another run can follow.
    jobs += [{"key": name, "name": name} for name in REFUSED] + refused
    jobs = [{"strategy": "fsdp", **job} for job in jobs]
    return runs.on_two_ranks(tmp_path_factory.mktemp("fsdp"), jobs, timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RIGHT)
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name):
    for rank in two_ranks:
        runs.assert_close(rank[name], runs.plain_run(name), TOLERANCE.get(name.partition(":")[0], 2e-6))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), SHARDINGS, ids=str)
def test_settings_change_the_sharding_and_not_the_training(two_ranks, name, settings):
    for rank in two_ranks:
        tolerance = TOLERANCE.get(name.partition(":")[0], 2e-6)
        runs.assert_close(rank[key_of(name, settings)], runs.plain_run(name), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_classes_and_diverged_ranks_end_on_all_ranks_with_a_named_cause(two_ranks, name):
    for rank in two_ranks:
        assert isinstance(rank[name], str)
        assert re.search(REFUSED[name], rank[name]), rank[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), REFUSED_SETTINGS, ids=str)
def test_settings_that_a_class_cannot_have_end_on_all_ranks_with_a_named_cause(two_ranks, name, settings):
    for rank in two_ranks:
        assert re.search(fsdp_hosted.OUTPUTS, rank[key_of(name, settings)])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_is_bit_equal_to_an_uninterrupted_one(two_ranks, name):
    for rank in two_ranks:
        actual, expected = rank[f"resumed {name}"], rank[name]
        assert not isinstance(actual, str), actual
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_resnet_and_its_norm_statistics_agree_with_torchs_ddp(two_ranks):
    for rank in two_ranks:
        runs.assert_close(rank[RESNET], two_ranks[0]["torch's ResNet"])


@pytest.mark.slow
def test_ranks_with_different_experts_agree_with_one_process_that_uses_both(two_ranks):
    plain = runs.plain_run(EXPERTS)
    used = {name: tensor for name, tensor in plain.items() if "experts.2" not in name and "experts.3" not in name}
    for rank in two_ranks:
        assert not isinstance(rank["unused"], str), rank["unused"]
        # The other weights have zero gradients, but AdamW decays them.
        runs.assert_close({name: rank["unused"][name] for name in used}, used, 2e-6)
