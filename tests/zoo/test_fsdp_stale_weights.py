"""Weights that change beside the optimizer, and forwards without backward in every place of a step, under FSDP 2."""

from __future__ import annotations

import pytest

from zoo import fsdp_stale_weights, runs

MODULE = "zoo.fsdp_stale_weights"
REFUSED = ("PenalisesWeights", "PenalisesWeightsFirst")
"""Sums of shards in a loss, which torch does not mix with whole tensors."""
NAMES = [name for name in fsdp_stale_weights.ZOO if name not in REFUSED]
# RMSprop divides by the root of squares as small as 1e-8.
TOLERANCE = {"WeightClipping": 1e-5, "WeightClippingThroughData": 1e-5}
KINDS = {"": {}, "blocks ": {"units": ["Linear"]}, "kept for backward ": {"reshard_after_forward": False}}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [
        {"key": f"{kind}{name}", "name": f"{MODULE}:{name}", "strategy": "fsdp", "sharding": sharding}
        for kind, sharding in KINDS.items()
        for name in (*NAMES, *REFUSED)
    ]
    return runs.on_two_ranks(tmp_path_factory.mktemp("stale"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name, kind):
    for rank in two_ranks:
        runs.assert_close(rank[f"{kind}{name}"], runs.plain_run(f"{MODULE}:{name}"), TOLERANCE.get(name, 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_in_a_loss_are_refused(two_ranks, name, kind):
    for rank in two_ranks:
        assert "torch has no such operation on sharded parameters" in rank[f"{kind}{name}"]
