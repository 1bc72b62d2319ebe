"""What the launcher of this process decides about a Lightning trainer: how many devices and nodes there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from .slurm_environment import NOT_GIVEN, placed_by_slurm

__all__ = ["placed_by_launcher"]


def placed_by_launcher(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What torchrun or Slurm changes in the arguments of a Lightning trainer; see `placed_by_slurm`.

    Under torchrun, whose number of nodes may differ from one start to the next, ``devices`` and ``num_nodes`` are what
    it has started, where they are not given.

    Raises:
        ValueError: The variables of Slurm cannot be used.
    """
    if not TorchElasticEnvironment.detect():
        return placed_by_slurm(arguments)
    placed = {}
    if arguments.get("devices") in NOT_GIVEN:
        placed["devices"] = _number("LOCAL_WORLD_SIZE")
    if arguments.get("num_nodes") in (None, 1):  # 1 is also what LightningCLI fills in
        placed["num_nodes"] = _number("GROUP_WORLD_SIZE")
    return {name: number for name, number in placed.items() if number is not None}


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
