"""What torchrun decides about a Lightning trainer."""

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from genlight.adapter.cluster.placement import TorchrunEnvironment, placed_by_launcher

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("devices", [None, "auto", -1, "-1"])
def test_devices_and_nodes_are_those_that_torchrun_has_started(torchrun, devices):
    assert placed_by_launcher({"devices": devices, "num_nodes": 1}) == {"devices": 2, "num_nodes": 3}


def test_what_the_job_says_of_them_stays(torchrun):
    assert placed_by_launcher({"devices": 4, "num_nodes": 2}) == {}
    assert placed_by_launcher({"devices": 2}) == {"num_nodes": 3}


def test_without_a_launcher_nothing_changes():
    assert placed_by_launcher({"devices": "auto"}) == {}


def test_ranks_that_would_meet_in_the_store_of_the_agent_get_one_of_their_own(torchrun, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    (environment,) = placed_by_launcher({"devices": 2, "num_nodes": 3})["plugins"]
    assert isinstance(environment, TorchrunEnvironment)
    assert "plugins" not in placed_by_launcher({"plugins": [LightningEnvironment()]})
