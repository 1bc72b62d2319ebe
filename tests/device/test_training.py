"""Trainer classes train on the simulated accelerator as a GPU needs it."""

from __future__ import annotations

import pytest

from device import alone, feeds, ranks, services
from support.device import Waiting
from support.device.checks import names_of, outcomes_of

one_rank = outcomes_of(alone)
looked_after = outcomes_of(services)
feed = outcomes_of(feeds)
two_ranks = outcomes_of(ranks, world_size=2, waiting=Waiting.STREAM)


@pytest.mark.parametrize("name", names_of(alone))
def test_on_one_device(one_rank, name):
    one_rank(name)


@pytest.mark.parametrize("name", names_of(services))
def test_what_looks_after_a_training(looked_after, name):
    looked_after(name)


@pytest.mark.parametrize("name", names_of(feeds))
def test_batches_of_a_feed(feed, name):
    feed(name)


@pytest.mark.parametrize("name", names_of(ranks))
def test_on_two_devices(two_ranks, name):
    two_ranks(name)
