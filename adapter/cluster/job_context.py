"""The place of this process in a scheduler's job, read only from the scheduler's variables.

Each field has the value of the first of its variables that is set and valid. If the host of rank 0 cannot be found,
this is an error: with ``localhost`` in its place, every node would train alone.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ..plumbing.settings import render_text

NODES = "GENLIGHT_NODES"
"""Variable that ``genlight run --restarts`` sets for the ranks that it forks: the number of nodes."""
MOST_HOSTS = 65_536
"""Maximum number of hosts in a hostlist. Slurm has the same limit for a single range."""

_BETWEEN_SEPARATORS = re.compile(r"(?:[^,\s\[\]]+|\[[^\[\]]*\]|[\[\]])+")
_WORD = re.compile(r"(?:[\w.:-]+|\[[\d,-]+\])+", re.ASCII)
_RANGE = re.compile(r"(?P<low>\d{1,18})(-(?P<high>\d{1,18}))?", re.ASCII)
_PORTS = range(15_000, 30_000)
_PER_JOB, _PER_STEP = 7919, 4793
"""Factors of `derived_port`. They share no factor with the number of ports, so that successive job ids get different
ports, and so do the steps of a job."""
_SPECIAL_STEPS = 0xFFFF_FFF0
"""First of the step numbers that Slurm gives to steps without a user's srun: the batch script, an interactive shell."""
_TASKS = re.compile(r"(?P<tasks>\d{1,9})(\(x(?P<times>\d{1,9})\))?", re.ASCII)
_GPUS = re.compile(r"([\w.:-]+[:=])?(?P<count>\d{1,9})(\([^)]*\))?", re.ASCII)
_KEPT = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "JOB_DIR")
_SECRET = ("SLURM_JWT",)
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

_T = TypeVar("_T")


@dataclass(frozen=True)
class JobContext:
    """The place of one process in a job; a field is None if the scheduler does not set it."""

    job_id: str | None = None
    """Differs for each task of an array; `environment` has SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID."""
    step_id: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    num_nodes: int | None = None
    local_world_size: int | None = None
    """Tasks on this node; other nodes may have a different number."""
    gpus_per_node: int | None = None
    hostnames: tuple[str, ...] = ()
    """Host names, in the order of the node ranks."""
    master_addr: str | None = None
    master_port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """The variables that this context was built from, without Slurm's token."""
    created_at: float = field(default_factory=time.time, compare=False)
    """When this context was made, in seconds since 1970."""
    output_dir: Path | None = None

    def torch_distributed_env(self, master_port: int | None = None) -> dict[str, str]:
        """Return the variables by which torch finds the other ranks; unknown ones are omitted.

        Args:
            master_port: Replaces the port of this context.
        """
        here = self if master_port is None else replace(self, master_port=master_port)
        names = ("master_addr", "master_port", "world_size", "rank", "local_rank", "local_world_size", "node_rank")
        return {name.upper(): str(value) for name in names if (value := getattr(here, name)) is not None}


def current_job_context() -> JobContext:
    """Return the place of this process, the same object until a variable changes; see `build_job_context`."""
    return _context_of(frozenset(os.environ.items()))


@functools.lru_cache(maxsize=1)
def _context_of(variables: frozenset[tuple[str, str]]) -> JobContext:
    return build_job_context(dict(variables))


def in_srun_task() -> bool:
    """Whether srun started this process as one of several tasks.

    The shell of ``salloc`` (often on a login node), the batch script and a step of one task have Slurm's variables,
    too, but whatever runs there must start its other ranks itself.
    """
    step, rank, tasks = (os.environ.get(f"SLURM_{name}", "") for name in ("STEP_ID", "PROCID", "STEP_NUM_TASKS"))
    is_step = step.isdecimal() and int(step) < _SPECIAL_STEPS and rank.isdecimal()
    return is_step and tasks.isdecimal() and int(tasks) > 1


def this_rank() -> int:
    """Return the rank of this process from the launcher's variables; 0 without a launcher. Needs no process group."""
    # Without RANK, as for the ranks of a pod, it is NODE_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK. LOCAL_RANK alone would
    # make the first process of every node rank 0.
    node, here = os.environ.get("NODE_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if "RANK" not in os.environ and node.isdigit() and here.isdigit():
        local = os.environ.get("LOCAL_RANK", "0")
        return int(node) * int(here) + (int(local) if local.isdigit() else 0)
    # Without LOCAL_WORLD_SIZE, a node's rank above 0 shows only that this process is not rank 0. On node 0, LOCAL_RANK
    # is the rank.
    for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK"):
        if name == "SLURM_PROCID" and not in_srun_task():
            continue  # outside of an srun task it is inherited, for example from the batch script, and not this rank
        number = os.environ.get(name, "")
        if number.isdigit() and (int(number) or name not in ("NODE_RANK", "GROUP_RANK")):
            return int(number)
    return 0


def is_rank_zero() -> bool:
    """Return whether this process is rank zero, which reports for the run."""
    return this_rank() == 0


def host_name() -> str:
    """Return the scheduler's name for this node, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def build_job_context(env: Mapping[str, str]) -> JobContext:
    """Return the context that these variables describe; outside of a job, nearly all fields are None.

    Raises:
        ValueError: Variables are malformed or contradict each other, or the other ranks cannot be found; every fault
            is listed.
    """
    faults: list[str] = []

    def first(parse: Callable[[str], _T], *names: str) -> _T | None:
        """Return the value of the first variable that is set and valid. If all that are set are invalid, note why."""
        invalid = []
        for name in names:
            if text := env.get(name, "").strip():
                try:
                    return parse(text)
                except ValueError as error:
                    invalid.append(f"`{name}`: {error}")
        faults.extend(invalid)
        return None

    job_id, step_id = first(str, "SLURM_JOB_ID", "SLURM_JOBID"), first(str, "SLURM_STEP_ID", "SLURM_STEPID")
    hostnames = first(expand_hostlist, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or []
    node_rank = first(_count, "SLURM_NODEID")
    num_nodes = first(_positive, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    tasks = first(_tasks_per_node, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or []
    address = first(_address, "MASTER_ADDR") or next(iter(hostnames), None)
    context = JobContext(
        job_id=job_id,
        step_id=step_id,
        rank=first(_count, "SLURM_PROCID"),
        local_rank=first(_count, "SLURM_LOCALID"),
        node_rank=node_rank,
        world_size=first(_positive, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "WORLD_SIZE"),
        num_nodes=num_nodes or len(hostnames) or None,
        local_world_size=_on_node(tasks, node_rank) or first(_positive, "SLURM_NTASKS_PER_NODE"),
        gpus_per_node=first(_gpus, "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
        hostnames=tuple(hostnames),
        master_addr=address or first(_address, "SLURM_LAUNCH_NODE_IPADDR"),
        # Not SLURM_SRUN_COMM_PORT, on which srun itself listens.
        master_port=first(_port, "MASTER_PORT") or _port_of(job_id, step_id),
        environment={
            name: value
            for name, value in env.items()
            if (name.startswith(("SLURM_", "SLURMD_")) or name in _KEPT) and name not in _SECRET
        },
        output_dir=first(Path, "JOB_DIR"),
    )
    if faults := [*faults, *_contradictions(context, tasks)]:
        raise ValueError("\n  - ".join(["The variables of Slurm cannot be used:", *faults]))
    return context


def _count(text: str, least: int = 0, most: int = 999_999_999) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not least <= int(text) <= most:
        raise ValueError(f"Expected a number from {least} to {most}, but received {text!r}.")
    return int(text)


_positive = functools.partial(_count, least=1)
_port = functools.partial(_count, least=1, most=65_535)


def _address(text: str) -> str:
    if not re.fullmatch(r"[\w.:%-]+", text, re.ASCII):
        raise ValueError(f"Expected the name or address of a host, but received {text!r}.")
    return text


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, from a text such as ``4(x2),3``."""
    tasks: list[int] = []
    for entry in text.split(","):
        match = _TASKS.fullmatch(entry)
        times = int(match["times"] or 1) if match else 0
        if match is None or not 0 < times <= MOST_HOSTS - len(tasks):
            raise ValueError(f"Expected tasks per node such as 4(x2),3, but received {text!r}.")
        tasks += [int(match["tasks"])] * times
    return tasks


def _gpus(text: str) -> int:
    """Return the number of GPUs, from ``8``, ``h100:8`` or ``a100:2,h100:6``."""
    matches = [_GPUS.fullmatch(entry) for entry in re.split(r",(?![^(]*\))", text)]
    if not all(matches):
        raise ValueError(f"Expected a number of GPUs such as 8 or h100:8, but received {text!r}.")
    return sum(int(match["count"]) for match in matches if match)


def _on_node(tasks: list[int], node_rank: int | None) -> int | None:
    if node_rank is not None and node_rank < len(tasks):
        return tasks[node_rank]
    return tasks[0] if len(set(tasks)) == 1 else None


def _port_of(job_id: str | None, step_id: str | None) -> int | None:
    """Return a port that all ranks derive by themselves; another job or step on the same node gets a different one."""
    return None if job_id is None else derived_port(_number(job_id), _number(step_id or "0"))


def derived_port(job: int, start: int) -> int:
    """Return a port for one start of a job; all its ranks derive it by themselves."""
    return _PORTS[(_PER_JOB * job + _PER_STEP * start) % len(_PORTS)]


def _number(text: str) -> int:
    """Return the number of a job or step; for a name, a number that all ranks derive from it."""
    return int(text) if text.isdecimal() else zlib.crc32(text.encode())


def _contradictions(context: JobContext, tasks: list[int]) -> Iterator[str]:
    """Yield the contradictions between the variables of Slurm."""
    nodes, ranks, env = context.num_nodes, context.world_size, context.environment
    for rank, size, variable, noun in (
        (context.rank, ranks, "SLURM_PROCID", "tasks"),
        (context.local_rank, context.local_world_size, "SLURM_LOCALID", "tasks on this node"),
        (context.node_rank, nodes, "SLURM_NODEID", "nodes"),
    ):
        if rank is not None and size is not None and rank >= size:
            yield f"`{variable}` is {rank}, but there are {size} {noun}, counted from 0."
    if context.hostnames and nodes != len(context.hostnames):
        yield f"There are {nodes} nodes, but the hostlist has {len(context.hostnames)} names."
    if tasks and nodes is not None and len(tasks) != nodes:
        yield f"There are {nodes} nodes, but the tasks per node are given for {len(tasks)}."
    # Outside of a step, SLURM_TASKS_PER_NODE counts the tasks that would fit on each node, so the sum may be larger
    # than the number of tasks.
    is_exact = "SLURM_STEP_TASKS_PER_NODE" in env and "SLURM_STEP_NUM_TASKS" in env
    if tasks and ranks is not None and (ranks > sum(tasks) or (is_exact and ranks < sum(tasks))):
        yield f"There are {ranks} tasks, but the tasks per node add up to {sum(tasks)}."
    if context.job_id is not None and max(ranks or 1, nodes or 1) > 1 and context.master_addr is None:
        yield "No variable gives the host of rank 0. Set `MASTER_ADDR`."


def expand_hostlist(text: str) -> list[str]:
    """Return the host names that a hostlist expression stands for, such as ``n[9-10],rack[1-2]n[3-4]``.

    The order is that of ``scontrol show hostnames``, because a node's rank is its position there; duplicates are kept.
    If there are three or more brackets, the last one varies fastest and the last but one slowest. A suffix after the
    last bracket (``n[1-2]-ib``) is allowed, although Slurm before 23 refuses it.

    Raises:
        ValueError: It names no host, is malformed, or stands for more than 65,536 hosts; the message quotes it.
    """
    try:
        names = (name for word in _BETWEEN_SEPARATORS.findall(text) for name in _names(word))
        found = list(itertools.islice(names, MOST_HOSTS + 1))
    except ValueError as error:
        raise ValueError(f"Invalid hostlist {text!r}. {error}") from None
    if not found:
        raise ValueError(f"Invalid hostlist {text!r}. It names no host.")
    if len(found) > MOST_HOSTS:
        raise ValueError(f"Invalid hostlist {text!r}. It stands for more than {MOST_HOSTS:,} hosts.")
    return found


def _names(word: str) -> Iterator[str]:
    """Yield the host names that one word of a hostlist stands for."""
    if _WORD.fullmatch(word) is None:
        raise ValueError(
            f"{word!r} is not a host name. Brackets in it may hold only numbers and ranges, such as [9-10,12]."
        )
    parts = re.split(r"[\[\]]", word)
    brackets = range(1, len(parts), 2)
    # Like scontrol: the last bracket varies fastest, and among the others the last one varies slowest.
    order = [*reversed(brackets[:-1]), *brackets[-1:]]
    # Stop expanding a bracket once it has more hosts than the limit.
    choices = [list(itertools.islice(_numbers(parts[place]), MOST_HOSTS + 1)) for place in order]
    for numbers in itertools.product(*choices):
        filled = {**dict(enumerate(parts)), **dict(zip(order, numbers, strict=True))}
        yield "".join(filled.values())


def _numbers(entries: str) -> Iterator[str]:
    for entry in entries.split(","):
        match = _RANGE.fullmatch(entry)
        low, high = (int(match["low"]), int(match["high"] or match["low"])) if match else (1, 0)
        if match is None or high < low:
            raise ValueError(f"{entry!r} is not a number, nor a range of rising numbers.")
        yield from (f"{number:0{len(match['low'])}d}" for number in range(low, high + 1))


def rank_errors(environ: Mapping[str, str]) -> list[str]:
    """Return the errors in the variables that give this process's rank and, in a Slurm job, its place in the job."""
    wrong = [
        f"Invalid `{name}`. Expected a rank (a whole number from 0), as launchers set it, but received "
        f"{render_text(environ[name].strip())}. Unset it."
        for name in _RANKS
        if name in environ and not environ[name].strip().isdecimal()
    ]
    if wrong or "SLURM_JOB_ID" not in environ:
        return wrong
    try:
        build_job_context(environ)
    except ValueError as error:
        return [str(error)]
    return []
