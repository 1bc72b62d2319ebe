"""Rank and host of this process, before a process group exists."""

from __future__ import annotations

import os
import socket

from ..cluster.job_context import in_srun_task


def this_rank() -> int:
    """Return the rank of this process from the launcher's environment; 0 without a launcher."""
    # Without RANK, compute it from the node's rank: the first process of a later node is not rank 0.
    node, here = os.environ.get("NODE_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if "RANK" not in os.environ and node.isdigit() and here.isdigit():
        local = os.environ.get("LOCAL_RANK", "0")
        return int(node) * int(here) + (int(local) if local.isdigit() else 0)
    for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK"):
        if name == "SLURM_PROCID" and not in_srun_task():
            continue  # SLURM_PROCID belongs to the batch script that started this process or its parent
        number = os.environ.get(name, "")
        if number.isdigit() and (int(number) or name not in ("NODE_RANK", "GROUP_RANK")):
            return int(number)
    return 0


def is_rank_zero() -> bool:
    """Return whether this process reports for the run."""
    return this_rank() == 0


def host_name() -> str:
    """Return the scheduler's name for this node, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
