"""The simulated accelerator has the rules of a GPU, and trainer classes train on it under them."""

import pytest

from device import feeds, one_rank, ranks, rules, services
from support.device import Waiting
from support.device.checks import names_of, outcomes_of

device = outcomes_of(rules)
one_device = outcomes_of(one_rank)
services_of_a_training = outcomes_of(services)
batches_of_a_feed = outcomes_of(feeds)
two_devices = outcomes_of(ranks, world_size=2, waiting=Waiting.STREAM)

MODULES = {
    "device": rules,
    "one_device": one_rank,
    "services_of_a_training": services,
    "batches_of_a_feed": feeds,
    "two_devices": ranks,
}


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, module in MODULES.items() for name in names_of(module)]
)
def test_each_rule_holds(request, where, name):
    request.getfixturevalue(where)(name)
