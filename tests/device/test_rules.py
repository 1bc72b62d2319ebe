"""The simulated accelerator keeps the rules of a GPU."""

from __future__ import annotations

import pytest

from device import collectives, rules
from support.device import Waiting
from support.device.checks import names_of, outcomes_of

pytestmark = pytest.mark.promise(name="ranks")

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
