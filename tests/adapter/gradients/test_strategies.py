"""Cases that the zoo's table does not have: other weights per rank, small buckets, sharded blocks, bf16-true, hooks.

Each class of `zoo.small` ends with the weights of a plain torch loop, on one process and on two.
"""

from __future__ import annotations

import re

import pytest
import torch
from zoo import runs, small as zoo

from genlight.callbacks import Recover

pytestmark = pytest.mark.promise(name="ranks")

# It computes in half precision itself: rounding differs between two half batches and a full one.
TOLERANCE = {"OwnScaler": 1e-3}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_one_process_in_fp32_is_bit_equal_to_plain_torch(name):
    expected = runs.plain_run(name)

    module, trainer = runs.hosted_run(name)

    actual = runs.weights(module.contract_state, module.plugin)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert trainer.global_step == runs.STEPS
    assert module.hosted_trainer.router is None, "one device in fp32 needs no routing"


BY_HAND = "UpdatesByHandFromAutograd"
ON_RANKS = [name for name in zoo.ZOO if name != BY_HAND]
# Excluded because ranks have to make the same calls under FSDP; the last one calls parts that would have to be units.
UNSHARDED = ("UnusedOnOneRank", "OwnDdp", "GradientsOfBothKinds", "Checkpointed")
SHARDED = [name for name in ON_RANKS if name not in UNSHARDED]
BLOCKS = [
    "Base",
    "Gan",
    "Penalty",
    "Tied",
    "Accumulating",
    "WithEma",
    "Adapted",
    "Checkpointed",
    "SavingAndLoading",
]
HALF = ["Base", "Gan", "Accumulating", "ClippedByValue", "ClampedInside", "OwnScaler", "AdamClosure", "LooseTensor"]

SETTINGS = ["find_unused_parameters", "static_graph"]
CHANGING = ["Base", "UnusedOnOneRank", "Checkpointed", "Accumulating"]
"""Classes whose ranks or steps have different graphs, and one with equal graphs."""
OVERFLOWING = ["OverflowOnOneRank", "OverflowThatClippingHides"]


INTERRUPTED = {
    "ddp": {"name": "Scheduled"},
    "ddp 16-mixed": {"name": "Accumulating", "precision": "16-mixed"},
    "fsdp": {"name": "WithEma", "strategy": "fsdp"},
    "blocks": {"name": "Gan", "strategy": "fsdp", "sharding": {"units": ["Linear"]}},
    "fsdp 16-mixed": {"name": "Accumulating", "strategy": "fsdp", "precision": "16-mixed"},
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The results of all classes from one pair of processes, since starting a pair takes seconds."""
    jobs = [{"key": f"ddp {name}", "name": name} for name in ON_RANKS]
    jobs += [{"key": f"small buckets {name}", "name": name, "strategy": "small buckets"} for name in ON_RANKS]
    jobs += [{"key": f"fsdp {name}", "name": name, "strategy": "fsdp"} for name in SHARDED]
    blocks = {"strategy": "fsdp", "sharding": {"units": ["Linear"]}}
    jobs += [{"key": f"blocks {name}", "name": name, **blocks} for name in BLOCKS]
    for precision in ("bf16-mixed", "16-mixed", "bf16-true"):
        jobs += [{"key": f"{precision} {name}", "name": name, "precision": precision} for name in HALF]
    jobs += [{"key": f"refused {name}", "name": name} for name in ("Hidden", "InThread", "InPrepareBatch", BY_HAND)]
    half_sharded = {"strategy": "fsdp", "precision": "16-mixed"}
    jobs += [{"key": f"fsdp 16-mixed {name}", "name": name, **half_sharded} for name in HALF]
    jobs += [{"key": f"fsdp {name}", "name": name, **half_sharded} for name in OVERFLOWING]
    jobs += [{"key": "overflow", "name": "OverflowOnOneRank", "precision": "16-mixed"}]
    skipping = {"name": "OverflowOnOneRank", "skips": True}
    jobs += [{"key": f"skip {strategy}", "strategy": strategy, **skipping} for strategy in ("ddp", "fsdp")]
    jobs += [{"key": "fsdp bf16-mixed", "name": "Base", "strategy": "fsdp", "precision": "bf16-mixed"}]
    jobs += [{"key": f"interrupted {key}", "interrupted": 2, **INTERRUPTED[key]} for key in INTERRUPTED]
    jobs += [{"key": f"torch {name}", "name": name, "strategy": "torch's own"} for name in ("Base", "Normalized")]
    for hook in runs.HOOKS:
        jobs += [{"key": hook, "name": "Base", "strategy": hook}]
        jobs += [{"key": f"torch {hook}", "name": "Base", "strategy": "torch's own", "hook": hook}]
    jobs += [{"key": f"{kind} {name}", "name": name, "strategy": kind} for kind in SETTINGS for name in CHANGING]
    return runs.on_two_ranks(tmp_path_factory.mktemp("two_ranks"), jobs)


ALIKE = [
    *(f"ddp {name}" for name in ON_RANKS if name != "Normalized"),
    *(f"fsdp {name}" for name in SHARDED if name != "Normalized"),
    *(f"blocks {name}" for name in BLOCKS),
]


@pytest.mark.slow
@pytest.mark.parametrize("key", ALIKE)
def test_two_ranks_with_half_the_rows_each_agree_with_one_plain_process(two_ranks, key):
    name = key.rpartition(" ")[2]
    for rank in two_ranks:
        runs.assert_close(rank[key], runs.plain_run(name), TOLERANCE.get(name, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_replicas_are_bit_equal_also_if_gradients_travel_inside_of_backward(two_ranks, name):
    expected = two_ranks[0][f"ddp {name}"]
    for found in (rank[key] for rank in two_ranks for key in (f"ddp {name}", f"small buckets {name}")):
        assert not isinstance(found, str), found
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "uninterrupted"),
    [
        ("ddp", "ddp Scheduled"),
        ("ddp 16-mixed", "16-mixed Accumulating"),
        ("fsdp", "fsdp WithEma"),
        ("blocks", "blocks Gan"),
        ("fsdp 16-mixed", "fsdp 16-mixed Accumulating"),
    ],
)
def test_a_run_restored_from_a_lightning_checkpoint_is_bit_equal_to_an_uninterrupted_one(two_ranks, key, uninterrupted):
    for rank in two_ranks:
        actual, expected = rank[f"interrupted {key}"], rank[uninterrupted]
        assert not isinstance(actual, str), actual
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Base", "Normalized"])
def test_two_ranks_agree_with_torchs_own_ddp_norm_statistics_included(two_ranks, name):
    runs.assert_close(two_ranks[0][f"ddp {name}"], two_ranks[0][f"torch {name}"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("hook", runs.HOOKS)
def test_a_communication_hook_gives_the_bits_that_it_gives_under_torchs_own_ddp(two_ranks, hook):
    for rank in two_ranks:
        hooked, torchs, exact = rank[hook], rank[f"torch {hook}"], rank["ddp Base"]
        assert not isinstance(hooked, str), hooked
        assert all(torch.equal(hooked[key], torchs[key]) for key in torchs)
        assert not all(torch.equal(hooked[key], exact[key]) for key in exact)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CHANGING)
def test_settings_of_ddp_that_are_not_needed_here_allow_any_graph_and_change_no_bit(two_ranks, setting, name):
    for rank in two_ranks:
        actual, expected = rank[f"{setting} {name}"], rank[f"ddp {name}"]
        assert not isinstance(actual, str), actual
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize(
    ("mode", "tolerance"), [("bf16-mixed", 0.02), ("16-mixed", 0.003), ("bf16-true", 0.1), ("fsdp 16-mixed", 0.003)]
)
def test_two_ranks_in_half_precision_agree_with_one_process_within_its_rounding(two_ranks, mode, tolerance, name):
    module, _ = runs.hosted_run(name, **runs.precision_of(mode.removeprefix("fsdp ")))
    expected = runs.weights(module.contract_state, module.plugin)

    for rank in two_ranks:
        actual = dict(rank[f"{mode} {name}"])
        assert actual.pop("overflow_steps", 0) == 0
        runs.assert_close(actual, expected, tolerance)
    first, second = (rank[f"{mode} {name}"] for rank in two_ranks)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_is_infinite_on_one_rank_skips_the_update_on_all_where_that_is_asked_for(two_ranks, strategy):
    module, _ = runs.hosted_run("OverflowOnOneRank", callbacks=[Recover(["skip"], good_steps=1)])
    expected = runs.weights(module.contract_state, module.plugin)

    for rank in two_ranks:
        runs.assert_close(rank[f"skip {strategy}"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["overflow", *(f"fsdp {name}" for name in OVERFLOWING)])
def test_an_overflow_on_one_rank_or_in_its_shard_skips_the_update_on_all(two_ranks, key):
    first, second = (rank[key] for rank in two_ranks)

    assert not isinstance(first, str), first
    assert first["overflow_steps"] == second["overflow_steps"] == 1
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.isfinite(t).all() for t in first.values())


@pytest.mark.slow
def test_sharding_in_bf16_mixed_agrees_with_one_process_within_its_rounding(two_ranks):
    module, _ = runs.hosted_run("Base", **runs.precision_of("bf16-mixed"))

    runs.assert_close(two_ranks[0]["fsdp bf16-mixed"], runs.weights(module.contract_state, module.plugin), 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Hidden", r"optimizer \(Adam\) that is neither in the state nor on the trainer"),
        ("InThread", r"Adam.step\(\) is called outside of `train_step` or in another thread"),
        (BY_HAND, r"returns this rank's gradients of parameters that no optimizer holds.*call backward\(\)"),
        ("InPrepareBatch", r"Adam.step\(\) is called outside of `train_step`"),
    ],
)
def test_an_update_that_would_not_be_synchronized_is_refused_with_the_reason(two_ranks, name, reason):
    for rank in two_ranks:
        assert isinstance(rank[f"refused {name}"], str)
        assert re.search(reason, rank[f"refused {name}"])
