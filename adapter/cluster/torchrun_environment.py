"""torchrun as Lightning's cluster environment, with a store of its own for each start of the ranks.

The agents of torch 2.13 hand all starts of a job the same store. What the ranks of an earlier start have written
there, such as the addresses at which they were to be found, is read by those of the next one: without the environment
below, a restart after a failure waits for processes that have ended, fails, and costs another restart.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from datetime import timedelta
from functools import cached_property

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # it does export them
from typing_extensions import override

__all__ = ["TorchrunEnvironment", "shares_store_of_agent"]

SHARED = "TORCHELASTIC_USE_AGENT_STORE"
PLACE, PROOF = "genlight/store-of-this-start", "genlight/proof"
LOOK_EVERY_S = 0.05
ANSWERS_WITHIN_S = 5.0
"""How long a store that is there may take; that of an earlier start is not there."""


def shares_store_of_agent() -> bool:
    """Whether torchrun has this process meet the others in the store of its agent."""
    return os.environ.get(SHARED) == str(True)


class TorchrunEnvironment(TorchElasticEnvironment):
    """Ranks that torchrun started, which meet in a store that rank zero opens for this start alone.

    ``genlight run`` and ``genlight fit`` use it by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._server: TCPStore | None = None

    @property
    @override
    def main_port(self) -> int:
        """The port of that store. All ranks ask for it, and wait for rank zero."""
        return self._port

    @cached_property
    def _port(self) -> int:
        if not shares_store_of_agent():
            return super().main_port
        agent = TCPStore(self.main_address, super().main_port, is_master=False)
        if self.global_rank() == 0:
            self._server = open_store(agent, self.main_address)
            port = self._server.port
        else:
            port = find_store(agent, self.main_address)
        os.environ[SHARED] = str(False)  # torch reads it when the process group is made
        return port


def open_store(agent: Store, host: str) -> TCPStore:
    """A new store on a free port of this machine, made known in that of the agent."""
    server = TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    proof = secrets.token_hex(8)
    server.set(PROOF, proof)
    agent.set(PLACE, f"{server.port} {proof}")
    return server


def find_store(agent: Store, host: str) -> int:
    """The port of the store that rank zero has opened for this start; waits for it."""
    while True:
        if agent.check([PLACE]):
            port, proof = agent.get(PLACE).decode().split()
            if _is_there(host, int(port), proof):
                return int(port)
        time.sleep(LOOK_EVERY_S)


def _is_there(host: str, port: int, proof: str) -> bool:
    """Whether what was made known is not that of an earlier start, whose port may be free now, or another process's."""
    try:
        with contextlib.closing(socket.create_connection((host, port), timeout=ANSWERS_WITHIN_S)):
            pass
        patience = timedelta(seconds=ANSWERS_WITHIN_S)
        store = TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
        return store.check([PROOF]) and store.get(PROOF).decode() == proof
    except (OSError, DistError):
        return False
