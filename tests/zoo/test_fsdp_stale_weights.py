"""Weights that change beside the optimizer, and forwards without backward in every place of a step, under FSDP 2."""

from __future__ import annotations

import pytest

from zoo import fsdp_stale_weights, runs

MODULE = "zoo.fsdp_stale_weights"
NAMES = list(fsdp_stale_weights.ZOO)
# RMSprop divides by the root of squares as small as 1e-8.
TOLERANCE = {"WeightClipping": 1e-5, "WeightClippingThroughData": 1e-5}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [{"key": name, "name": f"{MODULE}:{name}", "strategy": "fsdp"} for name in NAMES]
    jobs += [
        {"key": f"blocks {name}", "name": f"{MODULE}:{name}", "strategy": "fsdp", "policy": "Linear"} for name in NAMES
    ]
    return runs.on_two_ranks(tmp_path_factory.mktemp("stale"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["", "blocks "])
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name, policy):
    for rank in two_ranks:
        runs.assert_close(rank[f"{policy}{name}"], runs.plain_run(f"{MODULE}:{name}"), TOLERANCE.get(name, 1e-6))
