"""Slurm as Lightning's cluster environment, and what it adds to the arguments of a Lightning trainer."""

from __future__ import annotations

import os

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from typing_extensions import override

from .job_context import JobContext, current_job_context, in_srun_task

__all__ = ["SlurmEnvironment", "placement_fault"]


class SlurmEnvironment(ClusterEnvironment):
    """Ranks that srun started, with any number of them on each node.

    ``genlight run`` and ``genlight fit`` use it by themselves; elsewhere it is a plugin:
    ``Trainer(plugins=[SlurmEnvironment()], devices=..., num_nodes=...)``. Lightning's own takes the batch script for
    rank 0 and an interactive srun for no job, wants ``--ntasks-per-node``, and gives jobs ports that may be the same.

    Args:
        context: Where this process stands; None reads Slurm's variables.

    Raises:
        ValueError: This process is none of srun's tasks, or the variables cannot be used.
    """

    def __init__(self, context: JobContext | None = None) -> None:
        self.context = current_job_context() if context is None else context
        needed = ("rank", "local_rank", "node_rank", "world_size", "num_nodes", "master_addr", "master_port")
        missing = [name for name in needed if getattr(self.context, name) is None]
        if missing:
            raise ValueError(f"Slurm does not provide {', '.join(missing)}. Start this program with srun.")

    @staticmethod
    @override
    def detect() -> bool:
        return in_srun_task()

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return str(self.context.master_addr)

    @property
    @override
    def main_port(self) -> int:
        return _known(self.context.master_port)

    @override
    def world_size(self) -> int:
        return _known(self.context.world_size)

    @override
    def set_world_size(self, size: int) -> None:
        """Slurm decides; nodes may have another number of tasks each."""

    @override
    def global_rank(self) -> int:
        return _known(self.context.rank)

    @override
    def set_global_rank(self, rank: int) -> None:
        """Slurm decides."""

    @override
    def local_rank(self) -> int:
        return _known(self.context.local_rank)

    @override
    def node_rank(self) -> int:
        return _known(self.context.node_rank)

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a trainer whose devices and nodes are not the tasks that srun started.

        Raises:
            ValueError: Says what srun started and what the trainer wants.
        """
        here, nodes = self.context.local_world_size, self.context.num_nodes
        if (here is None or num_devices == here) and num_nodes == nodes:
            return
        host = self.context.hostnames[self.node_rank()] if self.context.hostnames else f"node {self.node_rank()}"
        raise ValueError(
            f"srun started {self.world_size()} tasks on {nodes} nodes, {here} of them on {host}, but the trainer has "
            f"devices={num_devices} and num_nodes={num_nodes}. Start it with `srun --nodes={num_nodes} "
            f"--ntasks-per-node={num_devices}`, or leave `devices` and `num_nodes` out, and the tasks decide."
        )


def _known(number: int | None) -> int:
    assert number is not None  # the constructor has looked
    return number


def placement_fault(trainer: pl.Trainer) -> str | None:
    """Why the ranks of a Lightning trainer are not the processes of this Slurm job; None where they are, or none is."""
    strategy_has = getattr(trainer.strategy, "cluster_environment", None)
    if TorchElasticEnvironment.detect() or "SLURM_JOB_ID" not in os.environ:
        return None
    if in_srun_task():
        if isinstance(strategy_has, SlurmEnvironment | SLURMEnvironment | None):
            try:
                SlurmEnvironment().validate_settings(trainer.num_devices, trainer.num_nodes)
            except ValueError as error:
                return str(error)
        return None
    if trainer.num_nodes > 1 and isinstance(strategy_has, LightningEnvironment) and not _has_node_rank():
        return (
            f"The trainer has num_nodes={trainer.num_nodes}, but this process is not a task of srun, and nothing "
            "starts the ranks of the other nodes. Start it with `srun --ntasks-per-node=N`, N being the devices of a "
            "node."
        )
    return None


def _has_node_rank() -> bool:
    return any(name in os.environ for name in ("NODE_RANK", "GROUP_RANK"))
