"""The launcher's decisions about a Lightning trainer: devices, nodes, and the rendezvous of the ranks.

For Slurm there is a Lightning cluster environment here; torchrun uses Lightning's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from typing_extensions import override

from ..plumbing.text import as_list
from .job_context import NODES, JobContext, current_job_context, derived_port, in_srun_task

_NOT_GIVEN = (None, "auto", -1, "-1")
"""The values of `devices` that leave the decision to the launcher."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class SlurmEnvironment(ClusterEnvironment):
    """Lightning's environment for ranks that srun started, with any number of them on each node.

    ``genlight run`` and ``genlight fit`` use it automatically; in other programs it is a plugin:
    ``Trainer(plugins=[SlurmEnvironment()], devices=..., num_nodes=...)``. Lightning's own `SLURMEnvironment` treats the
    batch script as rank 0, does not recognize an interactive srun, requires ``--ntasks-per-node``, and may give two
    jobs the same port.

    Args:
        context: The place of this process; None reads Slurm's variables.

    Raises:
        ValueError: This process is not a task of srun, or the variables cannot be used.
    """

    creates_processes_externally = True
    main_address, main_port = "", 0

    def __init__(self, context: JobContext | None = None) -> None:
        self.context = current_job_context() if context is None else context
        needed = ("rank", "local_rank", "node_rank", "world_size", "num_nodes", "master_addr", "master_port")
        self._known = {name: getattr(self.context, name) for name in needed}
        missing = [name for name, value in self._known.items() if value is None]
        if missing:
            raise ValueError(f"Slurm does not provide {', '.join(missing)}. Start this program with srun.")
        self.main_address, self.main_port = self._known["master_addr"], self._known["master_port"]

    @staticmethod
    @override
    def detect() -> bool:
        return in_srun_task()

    @override
    def world_size(self) -> int:
        return int(self._known["world_size"])

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: Slurm decides, and nodes may have different numbers of tasks."""

    @override
    def global_rank(self) -> int:
        return int(self._known["rank"])

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: Slurm decides."""

    @override
    def local_rank(self) -> int:
        return int(self._known["local_rank"])

    @override
    def node_rank(self) -> int:
        return int(self._known["node_rank"])

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a trainer whose devices and nodes do not match the tasks that srun started.

        Raises:
            ValueError: They do not match; the message has both.
        """
        here, nodes = self.context.local_world_size, self.context.num_nodes
        if (here is None or num_devices == here) and num_nodes == nodes:
            return
        host = self.context.hostnames[self.node_rank()] if self.context.hostnames else f"node {self.node_rank()}"
        raise ValueError(
            f"srun started {self.world_size()} tasks on {nodes} nodes, {here} of them on {host}, but the trainer has "
            f"devices={num_devices} and num_nodes={num_nodes}. Start it with `srun --nodes={num_nodes} "
            f"--ntasks-per-node={num_devices}`, or omit `devices` and `num_nodes`, and the tasks decide."
        )


def launcher_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Lightning trainer that a launcher changes: ``plugins``, ``devices``, ``num_nodes``.

    Under torchrun (whose number of nodes may differ from one start to the next) and under srun, the processes are the
    ranks, and their number is the default of ``devices`` and ``num_nodes``. Elsewhere in a Slurm job (its batch script,
    the shell of ``salloc``, a step of one task) the trainer starts its other ranks itself, although Lightning would
    wait for srun to do it. A cluster environment of the caller is kept.

    Raises:
        ValueError: The variables of Slurm cannot be used.
    """
    plugins = as_list(arguments.get("plugins"))
    has_own = getattr(arguments.get("strategy"), "cluster_environment", None) is not None
    has_own |= any(isinstance(each, ClusterEnvironment) for each in plugins)
    environment: ClusterEnvironment | None = None
    devices = num_nodes = None
    # `genlight run --restarts` forked this rank; a launcher such as torchrun started only one supervisor on each node.
    if NODES in os.environ:
        environment = None if has_own else LightningEnvironment()
        devices, num_nodes = _number("LOCAL_WORLD_SIZE"), _number(NODES)
    elif TorchElasticEnvironment.detect():
        # Also if srun started torchrun, because torchrun numbers its processes itself.
        if not has_own:
            _meet_in_own_store()
        devices, num_nodes = _number("LOCAL_WORLD_SIZE"), _number("GROUP_WORLD_SIZE")
    elif in_srun_task() and not has_own:
        environment = slurm = SlurmEnvironment()
        devices, num_nodes = slurm.context.local_world_size, slurm.context.num_nodes
    elif "SLURM_NTASKS" in os.environ and not has_own:
        environment = LightningEnvironment()
    placed: dict[str, Any] = {} if environment is None else {"plugins": [*plugins, environment]}
    if devices is not None and arguments.get("devices") in _NOT_GIVEN:
        placed["devices"] = devices
    if num_nodes is not None and arguments.get("num_nodes") in (None, 1):  # 1 is also what LightningCLI fills in
        placed["num_nodes"] = num_nodes
    return placed


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _meet_in_own_store() -> None:
    """Have the ranks that torchrun started meet in a store that rank zero opens only for this start.

    The agents of torch 2.13 give all starts of a job the same store. After a restart, the ranks would read there the
    addresses of ranks that have ended, wait for them, and fail. Two starts may have the
    same restart count, and so the same port, after a change of nodes. The port is free again by then, because agents
    end all ranks of a start before the next one.
    """
    if os.environ.get(_AGENT_STORE) == str(True):
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        os.environ["MASTER_PORT"] = str(derived_port(int(os.environ["MASTER_PORT"]), start))
        os.environ[_AGENT_STORE] = str(False)  # torch reads it when the process group is made


def placement_fault(trainer: pl.Trainer) -> str | None:
    """Return why the ranks of a Lightning trainer are not the processes of this Slurm job; None if they are."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if TorchElasticEnvironment.detect() or "SLURM_JOB_ID" not in os.environ:
        return None
    if in_srun_task():
        if isinstance(environment, SlurmEnvironment | SLURMEnvironment | None):
            try:
                SlurmEnvironment().validate_settings(trainer.num_devices, trainer.num_nodes)
            except ValueError as error:
                return str(error)
        return None
    has_node_rank = "NODE_RANK" in os.environ or "GROUP_RANK" in os.environ
    if trainer.num_nodes > 1 and isinstance(environment, LightningEnvironment) and not has_node_rank:
        return (
            f"The trainer has num_nodes={trainer.num_nodes}, but this process is not a task of srun, and nothing "
            "starts the ranks of the other nodes. Start it with `srun --ntasks-per-node=N`, N being the devices of a "
            "node."
        )
    return None
