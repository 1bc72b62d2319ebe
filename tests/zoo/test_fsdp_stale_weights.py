"""Weights changed without the optimizer, and forward calls without backward at each place of a step, under FSDP 2."""

from __future__ import annotations

import pytest

from zoo import fsdp_stale_weights, runs

pytestmark = pytest.mark.promise(name="ranks")

MODULE = "zoo.fsdp_stale_weights"
NAMES = list(fsdp_stale_weights.ZOO)
KINDS = {"": {}, "blocks ": {"units": ["Linear"]}, "kept for backward ": {"reshard_after_forward": False}}
LOOKS_AT_ONE_PLACE = [
    name for name in fsdp_stale_weights.LOOKING if not name.endswith("FirstZeroedForwardedBackwardedSteppedLast")
]
"""The other kinds run only with classes that try all places."""
CASES = [(kind, name) for kind in KINDS for name in NAMES if not kind or name not in LOOKS_AT_ONE_PLACE]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    jobs = [
        {"key": f"{kind}{name}", "name": f"{MODULE}:{name}", "strategy": "fsdp", "sharding": KINDS[kind]}
        for kind, name in CASES
    ]
    return runs.on_two_ranks(tmp_path_factory.mktemp("stale"), jobs)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_two_sharded_ranks_agree_with_one_plain_process(two_ranks, name, kind):
    for rank in two_ranks:
        runs.assert_close(rank[f"{kind}{name}"], runs.plain_run(f"{MODULE}:{name}"), 1e-6)
