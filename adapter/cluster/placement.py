"""The launcher's decisions about a Lightning trainer: devices, nodes, and where the ranks meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from ..plumbing.text import as_list
from .slurm_environment import NOT_GIVEN, has_cluster_environment, placed_by_slurm
from .torchrun_environment import TorchrunEnvironment, shares_store_of_agent

__all__ = ["placed_by_launcher"]


def placed_by_launcher(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Lightning trainer that torchrun or Slurm changes; see `placed_by_slurm`.

    Under torchrun, whose number of nodes may differ from one start to the next, ``devices`` and ``num_nodes`` are what
    it has started, where they are not given.

    Raises:
        ValueError: The variables of Slurm cannot be used.
    """
    if not TorchElasticEnvironment.detect():
        return placed_by_slurm(arguments)
    placed: dict[str, Any] = {}
    if shares_store_of_agent() and not has_cluster_environment(arguments):
        placed["plugins"] = [*as_list(arguments.get("plugins")), TorchrunEnvironment()]
    if arguments.get("devices") in NOT_GIVEN:
        placed |= _number("devices", "LOCAL_WORLD_SIZE")
    if arguments.get("num_nodes") in (None, 1):  # 1 is also what LightningCLI fills in
        placed |= _number("num_nodes", "GROUP_WORLD_SIZE")
    return placed


def _number(argument: str, variable: str) -> dict[str, int]:
    text = os.environ.get(variable, "")
    return {argument: int(text)} if text.isdecimal() and int(text) > 0 else {}
