"""Norms, noise, optimizers of one's own, modules that only some ranks use: right under FSDP 2, or refused by name."""

from __future__ import annotations

import re

import pytest

from zoo import fsdp_values, runs

MODULE = "zoo.fsdp_values"
ZOO = fsdp_values.ZOO
FAULTS = [cls.__name__ for cls in fsdp_values.FAULTS]
NAMES = [name for name in ZOO if name not in FAULTS]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [{"key": name, "name": f"{MODULE}:{name}", "strategy": "fsdp"} for name in NAMES]
    jobs += [{"key": "torch's ResNet", "name": f"{MODULE}:ResNet", "strategy": "torch's own"}]
    # All ranks hear of a fault at the same point, so that one more run can follow.
    jobs += [{"key": name, "name": f"{MODULE}:{name}", "strategy": "fsdp"} for name in FAULTS]
    return runs.on_two_ranks(tmp_path_factory.mktemp("values"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ResNet"])
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name):
    for rank in two_ranks:
        runs.assert_close(rank[name], runs.plain_run(f"{MODULE}:{name}"), 2e-6)


@pytest.mark.slow
def test_a_resnet_agrees_with_torchs_own_ddp_norm_statistics_included(two_ranks):
    for rank in two_ranks:
        runs.assert_close(rank["ResNet"], two_ranks[0]["torch's ResNet"])


REASONS = {
    "SkipsOneLossOfItsOwn": (
        r"rank 0 is about to call backward, rank 1 to end the step\. Rank 0 is at "
        r".*fsdp_values\.py:\d+, in train_step\. `train_step` must update on all ranks or on none.*on_nonfinite to skip"
    ),
    "HeadsInPythonList": r'rank 0 is about to call state\["heads"\]\[0\], rank 1 to call state\["heads"\]\[1\]',
    "HeadsOfOtherSizes": r'rank 0 is about to call state\["heads"\]\[0\], rank 1 to call state\["heads"\]\[1\]',
    "HeadOnOneRank": r'rank 0 is about to call state\["heads"\]\[0\], rank 1 to call backward',
    "WithGatheringMuon": r"rank 0 is about to compute `norm` .* rank 1 to call torch.distributed.all_gather in",
    "WithGatheringMuonOfOneShape": r"for parameter 0 of the sharded ones, rank 1 .* for parameter 1 of the",
    "WithOwnCollective": r"OwnCollective.step\(\) calls torch.distributed.all_reduce on rank \d, but .* sharded",
    "KeepsItsBestWeights": r"compute `state_dict` of a sharded tensor of shape \(12, 6\)",
    "ReadsNormOnOneRank": r"rank 0 is about to compute `norm` of a sharded tensor .* rank 1 to update by Adam",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_ranks_that_part_ways_are_told_which_does_what(two_ranks, name):
    for rank in two_ranks:
        assert isinstance(rank[name], str)
        assert re.search(REASONS[name], rank[name])
