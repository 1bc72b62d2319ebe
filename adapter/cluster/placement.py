"""The launcher's decisions about a Lightning trainer: devices, nodes, and where the ranks meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from typing_extensions import override

from ..plumbing.text import as_list
from .job_context import derived_port, in_srun_task
from .slurm_environment import SlurmEnvironment

__all__ = ["TorchrunEnvironment", "placed_by_launcher"]

_NOT_GIVEN = (None, "auto", -1, "-1")
"""The values that `devices` may have where the launcher decides."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def placed_by_launcher(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Lightning trainer that torchrun or Slurm changes: ``plugins``, ``devices`` and ``num_nodes``.

    Under torchrun, whose number of nodes may differ from one start to the next, and under srun the processes are the
    ranks, and their number is what ``devices`` and ``num_nodes`` are where they are not given. In the rest of a Slurm
    job (its batch script, the shell of ``salloc``, a step of one task) the trainer starts its other ranks itself,
    though Lightning would wait for srun to do it. A cluster environment of the caller stays.

    Raises:
        ValueError: The variables of Slurm cannot be used.
    """
    chosen = _has_cluster_environment(arguments)
    environment: ClusterEnvironment | None = None
    if TorchElasticEnvironment.detect():  # also where srun started it: torchrun has numbered its processes itself
        environment = TorchrunEnvironment() if _shares_store_of_agent() and not chosen else None
        devices, num_nodes = _number("LOCAL_WORLD_SIZE"), _number("GROUP_WORLD_SIZE")
    elif chosen or not in_srun_task():
        environment = LightningEnvironment() if "SLURM_NTASKS" in os.environ and not chosen else None
        devices = num_nodes = None
    else:
        environment = slurm = SlurmEnvironment()
        devices, num_nodes = slurm.context.local_world_size, slurm.context.num_nodes
    placed: dict[str, Any] = {}
    if environment is not None:
        placed["plugins"] = [*as_list(arguments.get("plugins")), environment]
    if devices is not None and arguments.get("devices") in _NOT_GIVEN:
        placed["devices"] = devices
    if num_nodes is not None and arguments.get("num_nodes") in (None, 1):  # 1 is also what LightningCLI fills in
        placed["num_nodes"] = num_nodes
    return placed


def _has_cluster_environment(arguments: Mapping[str, Any]) -> bool:
    """Whether the caller has chosen one."""
    strategy_has_one = getattr(arguments.get("strategy"), "cluster_environment", None) is not None
    return strategy_has_one or any(isinstance(each, ClusterEnvironment) for each in as_list(arguments.get("plugins")))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _shares_store_of_agent() -> bool:
    """Whether torchrun has this process meet the others in the store of its agent."""
    return os.environ.get(_AGENT_STORE) == str(True)


class TorchrunEnvironment(TorchElasticEnvironment):
    """Ranks that torchrun started, which meet in a store that rank zero opens for this start alone.

    The agents of torch 2.13 hand all starts of a job the same store. What the ranks of an earlier start have written
    there, such as the addresses at which they were to be found, is read by those of the next one: without this, a
    restart after a failure waits for processes that have ended, fails, and costs another restart.

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
        if not _shares_store_of_agent():
            return super().main_port
        os.environ[_AGENT_STORE] = str(False)  # torch reads it when the process group is made
        return derived_port(super().main_port, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
