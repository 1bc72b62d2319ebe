"""Norms, noise, custom optimizers, modules that only some ranks use: correct under FSDP 2, or refused."""

from __future__ import annotations

import re

import pytest

from zoo import fsdp_values, runs

pytestmark = pytest.mark.promise(name="ranks")

MODULE = "zoo.fsdp_values"
OTHER_HEADS = r"rank 0 is about to call state\[\"model\"\]\.heads\.0, rank 1 to call state\[\"model\"\]\.heads\.1"
REFUSED = {
    "HeadsByRank": OTHER_HEADS,
    "Experts": r"rank 0 is about to leave gradients of 8 sharded .* ranks used different parameters; set `unused_param",
    "SkipsOneLossOfItsOwn": (
        r"rank 0 is about to call backward, rank 1 to end the step\. Rank 0 is at "
        r".*fsdp_values\.py:\d+, in train_step\. `train_step` must update on all ranks or on none.*on_nonfinite to skip"
    ),
    "HeadsInPythonList": r'rank 0 is about to call state\["heads"\]\[0\], rank 1 to call state\["heads"\]\[1\]',
    "HeadOnOneRank": r'rank 0 is about to call state\["heads"\]\[0\], rank 1 to call backward',
    "ReadsNormOnOneRank": r"rank 0 is about to compute `__float__` of a sharded tensor .* rank 1 to update by Adam",
}
RIGHT = [name for name in fsdp_values.ZOO if name not in REFUSED and name != "ResNet"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [{"key": name, "name": f"{MODULE}:{name}", "strategy": "fsdp"} for name in (*RIGHT, "ResNet")]
    jobs += [{"key": "torch's ResNet", "name": f"{MODULE}:ResNet", "strategy": "torch's own"}]
    unused = {"unused_parameters": True}
    jobs += [{"key": "unused", "name": f"{MODULE}:Experts", "strategy": "fsdp", "sharding": unused}]
    # All ranks get the error at the same point, so that another run can follow.
    jobs += [{"key": name, "name": f"{MODULE}:{name}", "strategy": "fsdp"} for name in REFUSED]
    return runs.on_two_ranks(tmp_path_factory.mktemp("values"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name):
    for rank in two_ranks:
        runs.assert_close(rank[name], runs.plain_run(f"{MODULE}:{name}"), 2e-6)


@pytest.mark.slow
def test_resnet_and_its_norm_statistics_agree_with_torchs_ddp(two_ranks):
    for rank in two_ranks:
        runs.assert_close(rank["ResNet"], two_ranks[0]["torch's ResNet"])


@pytest.mark.slow
def test_ranks_with_different_experts_agree_with_one_process_that_uses_both(two_ranks):
    plain = runs.plain_run(f"{MODULE}:Experts")
    used = {name: tensor for name, tensor in plain.items() if "experts.2" not in name and "experts.3" not in name}
    for rank in two_ranks:
        assert not isinstance(rank["unused"], str), rank["unused"]
        # The other weights have zero gradients, but AdamW decays them.
        runs.assert_close({name: rank["unused"][name] for name in used}, used, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_classes_and_diverged_ranks_end_with_a_named_cause(two_ranks, name):
    for rank in two_ranks:
        assert isinstance(rank[name], str)
        assert re.search(REFUSED[name], rank[name]), rank[name]
