"""The ranks of torchrun meet in a store of this start, whatever earlier ones have left in that of the agent."""

import os
import threading

import pytest
from torch.distributed import TCPStore

from genlight.adapter.cluster.torchrun_environment import PLACE, TorchrunEnvironment, find_store, open_store

HOST = "127.0.0.1"


def server():
    return TCPStore(HOST, 0, is_master=True, multi_tenant=True, wait_for_workers=False)


def dead_port():
    return server().port  # closed as soon as nothing refers to it


@pytest.mark.parametrize("stale", ["nothing", "ended", "anothers"])
def test_a_rank_waits_for_the_store_of_this_start(stale):
    agent, another = server(), server()
    if stale != "nothing":
        agent.set(PLACE, f"{dead_port() if stale == 'ended' else another.port} 0123456789abcdef")
    found = []
    thread = threading.Thread(target=lambda: found.append(find_store(agent, HOST)))
    thread.start()
    thread.join(0.3)
    assert found == []

    opened = open_store(agent, HOST)
    thread.join()
    assert found == [opened.port]


def test_torch_is_told_the_store_of_this_start(monkeypatch):
    agent = server()
    variables = {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(agent.port),
        "RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = TorchrunEnvironment()

    port = environment.main_port
    assert port == environment.main_port != agent.port
    assert find_store(agent, HOST) == port
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_where_torchrun_shares_no_store_its_port_is_taken(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert TorchrunEnvironment().main_port == 29400
