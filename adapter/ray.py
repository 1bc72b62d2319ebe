"""A job under Ray Train: the training function of each worker of a `TorchTrainer`.

Importing this module does not load Ray. Ray is not a requirement of genlight: ``pip install "ray[train]"``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .contract.exceptions import TrainingCanceled
from .job.config import resolve_run_config
from .plumbing.imports import require_linux
from .plumbing.redaction import safe_str
from .plumbing.text import as_list
from .plumbing.threads import started
from .run.rank_files import LAUNCH_ID
from .run.run import RunOptions, attempt_job

require_linux(__name__)

log = logging.getLogger(__name__)

ENVIRONMENT = {"class_path": "ray.train.lightning.RayLightningEnvironment"}
STRATEGY = {"class_path": "ray.train.lightning.RayDDPStrategy"}
REPLACED_STRATEGIES = (None, "auto", "ddp")
"""Strategies of a job that Ray's own strategy replaces."""
PREEMPTION_POLL_S = 2.0
"""Seconds between two queries to Ray. Clouds announce a preemption 30 s before it, or earlier."""
NOTICE_PATIENCE_S = 2.0
"""Seconds that a stopped rank waits for its own notice; Ray sends it to all ranks at the same time."""


def train_loop(job: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Callable[[], None]:
    """Return the training function of a job, for ``TorchTrainer(train_loop(…), scaling_config=…, run_config=…)``.

    Every worker is a rank. If a worker is lost or fails, Ray starts all of them again, as often as its
    ``FailureConfig`` allows, and they continue from the newest complete checkpoint. Ray does not restart a run that
    was canceled or that reached its time limit.

    If Ray announces that it takes back a node of the run (``ray.train.get_preemption_info``), all ranks save a
    checkpoint after the current step, and wait until Ray moves the run. Ray does not count that as a failure.

    Args:
        job: The job spec. The spec, its data and the run's folder have the same paths on all nodes.
        overrides: Settings in the form of ``--set`` of ``genlight run``: ``key=value``.

    Raises:
        StartupContractError: The job cannot be run; the message lists every fault.
    """
    path = Path(job).absolute()
    config = resolve_run_config(spec_path=path, overrides=overrides)
    trainer = config.lightning
    for_ray: dict[str, Any] = {"lightning.plugins": [*as_list(trainer.get("plugins")), ENVIRONMENT]}
    if trainer.get("strategy") in REPLACED_STRATEGIES:
        for_ray["lightning.strategy"] = STRATEGY
    # The absolute folder: Ray gives each worker another working directory.
    settings = {"artifacts_dir": str(config.artifacts_dir), "resume_from_latest": True}
    texts = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    texts += [f"{name}={json.dumps(value)}" for name, value in for_ray.items()]
    return functools.partial(_train, str(path), (*overrides, *texts))


def _train(path: str, overrides: Sequence[str]) -> None:
    """Run one attempt on one worker.

    Raises:
        BaseException: The exception that ended the attempt on this rank; it has been reported.
    """
    import ray.train

    ranks_here = ray.train.get_context().get_local_world_size()
    nodes, os.environ[LAUNCH_ID] = _agree(ray.train.get_context().get_node_rank())
    size = (f"lightning.devices={ranks_here}", f"lightning.num_nodes={nodes}")
    notice = _preemption_notice()
    options = RunOptions(
        spec_path=path,
        overrides=(*overrides, *size),
        stop_check=lambda: "preempted" if notice.is_set() else None,
    )
    _, error = attempt_job(options)
    is_preempted = isinstance(error, TrainingCanceled) and error.reason == "preempted"
    if is_preempted and notice.wait(NOTICE_PATIENCE_S):
        # Ray would count an exception as a failure of the run, and a return as its end. So this worker waits until Ray
        # ends it together with the node.
        log.warning("the checkpoint is saved; waiting for Ray to move the run")
        threading.Event().wait()
    if error is not None and not _is_final(error):
        raise error


def _preemption_notice() -> threading.Event:
    """Return an event that is set once Ray has announced that it takes back a node of this run.

    The query is a barrier of all workers. Therefore a separate thread of each worker makes it, not the training thread.
    """
    import ray.train

    notice = threading.Event()
    # Ray 2.60 has this function; the older API of Ray Train lacks it.
    read: Callable[[], object] | None = getattr(ray.train, "get_preemption_info", None)

    def ask(read: Callable[[], object]) -> None:
        try:
            while read() is None:
                notice.wait(PREEMPTION_POLL_S)
        except Exception as error:  # noqa: BLE001  # the actor that connects the workers may fail, for example
            log.warning("Ray's notices of preemption are not read any more: %s", safe_str(error))
        else:
            notice.set()

    if read is not None:
        started(threading.Thread(target=ask, args=(read,), name="genlight-ray-preemption", daemon=True))
    return notice


def _is_final(error: BaseException) -> bool:
    """Whether the user or a limit ended the run, so that Ray must not start it again."""
    return isinstance(error, TrainingCanceled) and error.reason != "preempted"


def _agree(node_rank: int) -> tuple[int, str]:
    """Return the number of nodes, and a name for this launch of all ranks. Collective, in the group of Ray."""
    import torch.distributed as dist

    ranks: list[Any] = [(node_rank, secrets.token_hex(8))]
    if dist.is_available() and dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (node_rank, secrets.token_hex(8)))
    return 1 + max(node for node, _ in ranks), ranks[0][1]
