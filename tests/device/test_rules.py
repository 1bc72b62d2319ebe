"""The simulated accelerator has the rules of a GPU, and trainer classes train on it under them."""

import pytest

from device import collectives, feeds, one_rank, ranks, rules, services
from support.device import Waiting
from support.device.checks import names_of, outcomes_of

outcome = outcomes_of(rules)
collective = outcomes_of(collectives, world_size=2)
collective_of_streams = outcomes_of(collectives, world_size=2, waiting=Waiting.STREAM)


@pytest.mark.parametrize("name", names_of(rules))
def test_device(outcome, name):
    outcome(name)


@pytest.mark.parametrize("name", names_of(collectives))
def test_process_group(collective, name):
    collective(name)


@pytest.mark.parametrize("name", names_of(collectives))
def test_process_group_if_streams_wait(collective_of_streams, name):
    collective_of_streams(name)


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
