"""Where a scheduler placed this process, read from its variables and from nothing else.

Each field takes the first of Slurm's variables that is set and sound. A look-up that fails is an error and never
``localhost``: every node would train a world of its own.
"""

from __future__ import annotations

import functools
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from .hostlist import MOST_HOSTS, expand_hostlist

__all__ = ["JobContext", "build_job_context", "current_job_context", "derived_port", "in_srun_task"]

_PORTS = range(15_000, 30_000)
_PER_JOB, _PER_STEP = 7919, 4793
"""Without a common factor with the number of ports: 15,000 job ids in a row, and their first steps, all differ."""
_SPECIAL_STEPS = 0xFFFF_FFF0
"""From here on Slurm numbers the steps that no srun of a user made: the batch script, an interactive shell."""
_TASKS = re.compile(r"(?P<tasks>\d{1,9})(\(x(?P<times>\d{1,9})\))?", re.ASCII)
_GPUS = re.compile(r"([\w.:-]+[:=])?(?P<count>\d{1,9})(\([^)]*\))?", re.ASCII)
_KEPT = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "JOB_DIR")
_SECRET = ("SLURM_JWT",)

_T = TypeVar("_T")


@dataclass(frozen=True)
class JobContext:
    """The place of one process in a job; what the scheduler does not tell is None."""

    job_id: str | None = None
    """Differs for each task of an array, which has SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID in `environment`."""
    step_id: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    num_nodes: int | None = None
    local_world_size: int | None = None
    """Tasks on this node; other nodes may have another number of them."""
    gpus_per_node: int | None = None
    hostnames: tuple[str, ...] = ()
    """In the order in which nodes are numbered."""
    master_addr: str | None = None
    master_port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """The variables that it was made from, without Slurm's token."""
    created_at: float = field(default_factory=time.time, compare=False)
    """Seconds since 1970."""
    output_dir: Path | None = None

    def torch_distributed_env(self, master_port: int | None = None) -> dict[str, str]:
        """The variables by which torch finds the other ranks; what is not known is left out.

        Args:
            master_port: Instead of the port of this context.

        Raises:
            ValueError: It is not a port.
        """
        if master_port is not None and not 0 < master_port < 65_536:
            raise ValueError(f"Invalid `master_port`. Expected a number from 1 to 65535, but received {master_port}.")
        values = {
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port if master_port is None else master_port,
            "WORLD_SIZE": self.world_size,
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "NODE_RANK": self.node_rank,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def current_job_context() -> JobContext:
    """The place of this process, the same object until a variable changes; see `build_job_context`."""
    return _context_of(frozenset(os.environ.items()))


@functools.lru_cache(maxsize=1)
def _context_of(variables: frozenset[tuple[str, str]]) -> JobContext:
    return build_job_context(dict(variables))


def in_srun_task(environ: Mapping[str, str] | None = None) -> bool:
    """Whether srun started this process as one of several tasks.

    A login node, the shell of ``salloc``, the batch script and a step of one task have Slurm's variables as well, but
    whatever runs there has to start its other ranks itself.
    """
    env = os.environ if environ is None else environ
    step, tasks = env.get("SLURM_STEP_ID", ""), env.get("SLURM_STEP_NUM_TASKS", "")
    is_step = step.isdecimal() and int(step) < _SPECIAL_STEPS and env.get("SLURM_PROCID", "").isdecimal()
    return is_step and tasks.isdecimal() and int(tasks) > 1


def build_job_context(env: Mapping[str, str]) -> JobContext:
    """The context that these variables describe; outside of a job, one of which hardly anything is known.

    Raises:
        ValueError: Variables are malformed or contradict each other, or the other ranks cannot be found; every fault
            is listed.
    """
    reader = _Reader(env)
    job_id, output_dir = reader.first(str, "SLURM_JOB_ID", "SLURM_JOBID"), reader.first(Path, "JOB_DIR")
    hostnames = reader.first(expand_hostlist, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or []
    node_rank, step_id = reader.first(_count, "SLURM_NODEID"), reader.first(str, "SLURM_STEP_ID", "SLURM_STEPID")
    num_nodes = reader.first(_positive, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    tasks = reader.first(_tasks_per_node, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    address = reader.first(_address, "MASTER_ADDR") or next(iter(hostnames), None)
    context = JobContext(
        job_id=job_id,
        step_id=step_id,
        rank=reader.first(_count, "SLURM_PROCID"),
        local_rank=reader.first(_count, "SLURM_LOCALID"),
        node_rank=node_rank,
        world_size=reader.first(_positive, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "WORLD_SIZE"),
        num_nodes=num_nodes or len(hostnames) or None,
        local_world_size=_on_node(tasks, node_rank) or reader.first(_positive, "SLURM_NTASKS_PER_NODE"),
        gpus_per_node=reader.first(_gpus, "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
        hostnames=tuple(hostnames),
        master_addr=address or reader.first(_address, "SLURM_LAUNCH_NODE_IPADDR"),
        # Not SLURM_SRUN_COMM_PORT, on which srun itself listens.
        master_port=reader.first(_port, "MASTER_PORT") or _derived_port(job_id, step_id),
        environment=_kept(env),
        output_dir=output_dir,
    )
    if faults := [*reader.faults, *_contradictions(context, tasks)]:
        raise ValueError("\n  - ".join(["The variables of Slurm cannot be used:", *faults]))
    return context


class _Reader:
    """Looks variables up, and notes those that hold something else than they should."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.faults: list[str] = []

    def first(self, parse: Callable[[str], _T], *names: str) -> _T | None:
        """The value of the first variable that is set and sound; a fault where some are set and none is sound."""
        faults = []
        for name in names:
            text = self._env.get(name, "").strip()
            if not text:
                continue
            try:
                return parse(text)
            except ValueError as error:
                faults.append(f"`{name}`: {error}")
        self.faults += faults
        return None


def _count(text: str, least: int = 0) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least:
        raise ValueError(f"Expected a number >= {least}, but received {text!r}.")
    return int(text)


_positive = functools.partial(_count, least=1)


def _port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or not 0 < int(text) < 65_536:
        raise ValueError(f"Expected a port from 1 to 65535, but received {text!r}.")
    return int(text)


def _address(text: str) -> str:
    if not re.fullmatch(r"[\w.:%-]+", text, re.ASCII):
        raise ValueError(f"Expected the name or address of a host, but received {text!r}.")
    return text


def _tasks_per_node(text: str) -> list[int]:
    """The tasks of each node, from ``4(x2),3``."""
    tasks: list[int] = []
    for entry in text.split(","):
        match = _TASKS.fullmatch(entry)
        times = int(match["times"] or 1) if match else 0
        if match is None or not 0 < times <= MOST_HOSTS - len(tasks):
            raise ValueError(f"Expected tasks per node such as 4(x2),3, but received {text!r}.")
        tasks += [int(match["tasks"])] * times
    return tasks


def _gpus(text: str) -> int:
    """The number of GPUs, from ``8``, ``h100:8`` or ``a100:2,h100:6``."""
    matches = [_GPUS.fullmatch(entry) for entry in re.split(r",(?![^(]*\))", text)]
    if not all(matches):
        raise ValueError(f"Expected a number of GPUs such as 8 or h100:8, but received {text!r}.")
    return sum(int(match["count"]) for match in matches if match)


def _on_node(tasks: list[int] | None, node_rank: int | None) -> int | None:
    if not tasks:
        return None
    if node_rank is not None:
        return tasks[node_rank] if node_rank < len(tasks) else None
    return tasks[0] if len(set(tasks)) == 1 else None


def _derived_port(job_id: str | None, step_id: str | None) -> int | None:
    """A port of which all ranks think, and another job or step on the same node does not."""
    if job_id is None:
        return None
    return derived_port(_number(job_id), 0 if step_id is None else _number(step_id))


def derived_port(job: int, start: int) -> int:
    """A port for one start of a job, of which all ranks think by themselves."""
    return _PORTS[(_PER_JOB * job + _PER_STEP * start) % len(_PORTS)]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else zlib.crc32(text.encode())


def _kept(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if (name.startswith(("SLURM_", "SLURMD_")) or name in _KEPT) and name not in _SECRET
    }


def _contradictions(context: JobContext, tasks: list[int] | None) -> list[str]:
    """The contradictions between the variables of Slurm."""
    faults = []
    for rank, size, variable, noun in (
        (context.rank, context.world_size, "SLURM_PROCID", "tasks"),
        (context.local_rank, context.local_world_size, "SLURM_LOCALID", "tasks on this node"),
        (context.node_rank, context.num_nodes, "SLURM_NODEID", "nodes"),
    ):
        if rank is not None and size is not None and rank >= size:
            faults.append(f"`{variable}` is {rank}, but there are {size} {noun}, counted from 0.")
    nodes, env = context.num_nodes, context.environment
    if context.hostnames and nodes != len(context.hostnames):
        faults.append(f"There are {nodes} nodes, but the hostlist has {len(context.hostnames)} names.")
    if tasks is not None and nodes is not None and len(tasks) != nodes:
        faults.append(f"There are {nodes} nodes, but the tasks per node are given for {len(tasks)}.")
    if tasks is not None and context.world_size is not None:
        # Outside of a step the tasks per node are what would fit there.
        is_exact = "SLURM_STEP_TASKS_PER_NODE" in env and "SLURM_STEP_NUM_TASKS" in env
        if context.world_size > sum(tasks) or (is_exact and context.world_size < sum(tasks)):
            faults.append(f"There are {context.world_size} tasks, but the tasks per node add up to {sum(tasks)}.")
    has_others = (context.world_size or 1) > 1 or (nodes or 1) > 1
    if context.job_id is not None and has_others and context.master_addr is None:
        faults.append("No variable gives the host of rank 0. Set `MASTER_ADDR`.")
    return faults
