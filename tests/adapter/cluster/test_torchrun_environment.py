"""The ranks of torchrun meet in a store of this start, whatever earlier ones have left in that of the agent."""

import os

import pytest

from genlight.adapter.cluster.placement import TorchrunEnvironment


@pytest.fixture
def shared(monkeypatch):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_each_start_has_a_port_of_its_own_that_torch_is_to_open(shared, monkeypatch):
    ports = []
    for count in range(3):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        environment = TorchrunEnvironment()
        ports.append(environment.main_port)
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert environment.main_port == ports[-1]
    assert len({29400, *ports}) == 4


def test_where_torchrun_shares_no_store_its_port_is_taken(shared, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert TorchrunEnvironment().main_port == 29400
