"""A job under Ray Train: what each worker of a `TorchTrainer` runs.

Importing this module does not load Ray, which is not among genlight's own requirements: ``pip install "ray[train]"``.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .contract.exceptions import TrainingCanceled
from .job.config import resolve_run_config
from .plumbing.operating_system import require_linux
from .plumbing.text import as_list
from .run.ranks import LAUNCH_ID
from .run.run import RunOptions, attempt_job

__all__ = ["train_loop"]

require_linux(__name__)

ENVIRONMENT = {"class_path": "ray.train.lightning.RayLightningEnvironment"}
STRATEGY = {"class_path": "ray.train.lightning.RayDDPStrategy"}
REPLICATED = (None, "auto", "ddp")
"""Strategies of a job in whose place Ray's own is taken."""


def train_loop(job: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Callable[[], None]:
    """The training function of a job, for ``TorchTrainer(train_loop(…), scaling_config=…, run_config=…)``.

    Every worker is a rank. One that is lost, or that fails, has Ray start all of them again, as often as its
    ``FailureConfig`` says, and they go on from the newest whole checkpoint. So does a run that was preempted; one that
    was cancelled, or whose time is over, has ended for Ray too.

    Args:
        job: The job spec; all nodes see it, its data and the run's folder at the same path.
        overrides: As ``--set`` of ``genlight run`` takes them: ``key=value``.

    Raises:
        StartupContractError: The job cannot be run; every fault is listed.
    """
    path = Path(job).absolute()
    config = resolve_run_config(spec_path=path, overrides=overrides)
    given = config.lightning
    placed: dict[str, Any] = {"lightning.plugins": [*as_list(given.get("plugins")), ENVIRONMENT]}
    if given.get("strategy") in REPLICATED:
        placed["lightning.strategy"] = STRATEGY
    settings = {"artifacts_dir": str(config.artifacts_dir), "resume_from_latest": True}
    # A worker's working directory is one of Ray's own.
    texts = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    texts += [f"{name}={json.dumps(value)}" for name, value in placed.items()]
    return functools.partial(_train, str(path), (*overrides, *texts))


def _train(path: str, overrides: Sequence[str]) -> None:
    """One attempt on one worker.

    Raises:
        BaseException: What ended the attempt on this rank; it has been reported.
    """
    import ray.train

    ranks_here = ray.train.get_context().get_local_world_size()
    nodes, os.environ[LAUNCH_ID] = _agreed(ray.train.get_context().get_node_rank())
    placed = (f"lightning.devices={ranks_here}", f"lightning.num_nodes={nodes}")
    _, error = attempt_job(RunOptions(spec_path=path, overrides=(*overrides, *placed)))
    if error is not None and not _is_wanted(error):
        raise error


def _is_wanted(error: BaseException) -> bool:
    """Whether the run has ended because its user or its limits say so, and not to be started again."""
    return isinstance(error, TrainingCanceled) and error.reason != "preempted"


def _agreed(node_rank: int) -> tuple[int, str]:
    """The number of nodes, and a name for this launch of all ranks. Collective, in the group that Ray has made."""
    import torch.distributed as dist

    placed: list[Any] = [(node_rank, secrets.token_hex(8))]
    if dist.is_available() and dist.is_initialized():
        placed = [None] * dist.get_world_size()
        dist.all_gather_object(placed, (node_rank, secrets.token_hex(8)))
    return 1 + max(node for node, _ in placed), placed[0][1]
