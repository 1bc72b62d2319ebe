"""Weights that change beside the optimizer, and forwards without backward in every place of a step, under FSDP 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fsdp_harness as harness

FILE = "fsdp_stale_weights.py"
NAMES = list(harness.classes(FILE))
# RMSprop divides by the root of squares as small as 1e-8.
TOLERANCE = {"WeightClipping": 1e-5, "WeightClippingThroughData": 1e-5}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [{"key": name, "file": FILE, "name": name, "strategy": "fsdp"} for name in NAMES]
    jobs += [
        {"key": f"blocks {name}", "file": FILE, "name": name, "strategy": "fsdp", "policy": "Linear"} for name in NAMES
    ]
    return harness.on_two_ranks(tmp_path_factory.mktemp("stale"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["", "blocks "])
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name, policy):
    for rank in two_ranks:
        harness.assert_close(rank[f"{policy}{name}"], harness.plain(FILE, name), TOLERANCE.get(name, 1e-6))
