"""This process among the ranks, before there is a process group to ask."""

from __future__ import annotations

import os
import socket

from ..cluster.job_context import in_srun_task

__all__ = ["host_name", "is_rank_zero", "this_rank"]


def this_rank() -> int:
    """The rank of this process, as far as the launcher's environment tells; 0 where there is no launcher."""
    # Where nothing tells the rank among all, that of the node does: its first process is not rank 0.
    node, here = os.environ.get("NODE_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if "RANK" not in os.environ and node.isdigit() and here.isdigit():
        local = os.environ.get("LOCAL_RANK", "0")
        return int(node) * int(here) + (int(local) if local.isdigit() else 0)
    for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK"):
        if name == "SLURM_PROCID" and not in_srun_task():
            continue  # that of the batch script, which this process or its parent was started from
        number = os.environ.get(name, "")
        if number.isdigit() and (int(number) or name not in ("NODE_RANK", "GROUP_RANK")):
            return int(number)
    return 0


def is_rank_zero() -> bool:
    """Whether this process reports for the run."""
    return this_rank() == 0


def host_name() -> str:
    """The name of this node, as its scheduler calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
