"""torchrun as Lightning's cluster environment, with a store of its own for each start of the ranks.

The agents of torch 2.13 hand all starts of a job the same store. What the ranks of an earlier start have written
there, such as the addresses at which they were to be found, is read by those of the next one: without the environment
below, a restart after a failure waits for processes that have ended, fails, and costs another restart.
"""

from __future__ import annotations

import os
from functools import cached_property

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from typing_extensions import override

from .job_context import derived_port

__all__ = ["TorchrunEnvironment", "shares_store_of_agent"]

SHARED = "TORCHELASTIC_USE_AGENT_STORE"


def shares_store_of_agent() -> bool:
    """Whether torchrun has this process meet the others in the store of its agent."""
    return os.environ.get(SHARED) == str(True)


class TorchrunEnvironment(TorchElasticEnvironment):
    """Ranks that torchrun started, which meet in a store that rank zero opens for this start alone.

    ``genlight run`` and ``genlight fit`` use it by themselves. Agents end the ranks of a start before the next one, so
    that nobody listens at its port any more, also where a start after a change of nodes has the same number.
    """

    @property
    @override
    def main_port(self) -> int:
        """The port of that store, which follows from that of the agents and the number of the start."""
        return self._port

    @cached_property
    def _port(self) -> int:
        if not shares_store_of_agent():
            return super().main_port
        os.environ[SHARED] = str(False)  # torch reads it when the process group is made
        return derived_port(super().main_port, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
