"""Trainer classes train on the simulated accelerator as a GPU needs it."""

from __future__ import annotations

import pytest

from device import alone, ranks
from support.device import Waiting
from support.device.checks import names_of, outcomes_of

one_rank = outcomes_of(alone)
two_ranks = outcomes_of(ranks, world_size=2, waiting=Waiting.STREAM)


@pytest.mark.parametrize("name", names_of(alone))
def test_on_one_device(one_rank, name):
    one_rank(name)


WAITS_STILL = {
    "check_no_step_of_fsdp_waits_for_the_device": "flags of gradients are read in each backward",
}


def _marked(name):
    reason = WAITS_STILL.get(name)
    return pytest.param(name, marks=pytest.mark.xfail(reason=reason, strict=True)) if reason else name


@pytest.mark.parametrize("name", [_marked(name) for name in names_of(ranks)])
def test_on_two_devices(two_ranks, name):
    two_ranks(name)
