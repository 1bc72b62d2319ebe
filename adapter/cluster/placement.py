"""The launcher's decisions about a Lightning trainer: devices, nodes, and where the ranks meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from ..plumbing.text import as_list
from .job_context import in_srun_task
from .slurm_environment import SlurmEnvironment
from .torchrun_environment import TorchrunEnvironment, shares_store_of_agent

__all__ = ["placed_by_launcher"]

_NOT_GIVEN = (None, "auto", -1, "-1")
"""The values that `devices` may have where the launcher decides."""


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
        environment = TorchrunEnvironment() if shares_store_of_agent() and not chosen else None
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
