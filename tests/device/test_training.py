"""Training of trainer classes on the simulated accelerator, under the rules of a GPU."""

from __future__ import annotations

import pytest

from device import feeds, one_rank, ranks, services
from support.device import Waiting
from support.device.checks import names_of, outcomes_of

pytestmark = pytest.mark.promise(name="ranks")

single = outcomes_of(one_rank)
service = outcomes_of(services)
feed = outcomes_of(feeds)
two_ranks = outcomes_of(ranks, world_size=2, waiting=Waiting.STREAM)


@pytest.mark.parametrize("name", names_of(one_rank))
def test_one_device(single, name):
    single(name)


@pytest.mark.parametrize("name", names_of(services))
def test_services_of_a_training(service, name):
    service(name)


@pytest.mark.parametrize("name", names_of(feeds))
def test_batches_of_a_feed(feed, name):
    feed(name)


@pytest.mark.parametrize("name", names_of(ranks))
def test_two_devices(two_ranks, name):
    two_ranks(name)
