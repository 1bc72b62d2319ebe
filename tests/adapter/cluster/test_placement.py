"""The decisions of torchrun about a Lightning trainer."""

import os

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from genlight.adapter.cluster.placement import launcher_arguments

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("devices", [None, "auto", -1, "-1"])
def test_devices_and_nodes_are_those_that_torchrun_has_started(torchrun, devices):
    assert launcher_arguments({"devices": devices, "num_nodes": 1}) == {"devices": 2, "num_nodes": 3}


def test_settings_of_the_job_are_kept(torchrun):
    assert launcher_arguments({"devices": 4, "num_nodes": 2}) == {}
    assert launcher_arguments({"devices": 2}) == {"num_nodes": 3}


def test_without_a_launcher_nothing_changes():
    assert launcher_arguments({"devices": "auto"}) == {}


def test_each_start_has_its_own_port_whatever_earlier_starts_left_in_the_agents_store(torchrun, monkeypatch):
    ports = []
    for count in range(3):
        shared = {"MASTER_PORT": "29400", AGENT_STORE: "True", "TORCHELASTIC_RESTART_COUNT": str(count)}
        for name, value in shared.items():
            monkeypatch.setenv(name, value)
        for _ in range(2):
            assert launcher_arguments({"devices": 2, "num_nodes": 3}) == {}
        assert os.environ[AGENT_STORE] == "False"
        ports.append(os.environ["MASTER_PORT"])
    assert len({"29400", *ports}) == 4


@pytest.mark.parametrize(("shares", "arguments"), [("False", {}), ("True", {"plugins": [LightningEnvironment()]})])
def test_where_torchrun_shares_no_store_or_the_caller_decides_its_port_is_taken(
    torchrun, monkeypatch, shares, arguments
):
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setenv(AGENT_STORE, shares)
    launcher_arguments(arguments)
    assert (os.environ["MASTER_PORT"], os.environ[AGENT_STORE]) == ("29400", shares)
