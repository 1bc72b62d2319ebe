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
"""Seconds between two questions to Ray. The clouds give 30 s of notice or more."""
NOTICE_PATIENCE_S = 2.0
"""How long a rank that was stopped waits for its own notice: the ranks get it within one answer of Ray."""


def train_loop(job: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Callable[[], None]:
    """Return the training function of a job, for ``TorchTrainer(train_loop(…), scaling_config=…, run_config=…)``.

    Every worker is a rank. If a worker is lost or fails, Ray starts all of them again, as often as its
    ``FailureConfig`` allows, and they continue from the newest complete checkpoint. A run that was canceled, or whose
    time is over, has ended for Ray, too.

    If Ray announces that it takes back a node of the run (``ray.train.get_preemption_info``), all ranks save a
    checkpoint after the current step, and wait until Ray moves the run. For Ray that is no failure.

    Args:
        job: The job spec; all nodes see it, its data and the run's folder at the same path.
        overrides: Settings in the form of ``--set`` of ``genlight run``: ``key=value``.

    Raises:
        StartupContractError: The job cannot be run; the message lists every fault.
    """
    path = Path(job).absolute()
    config = resolve_run_config(spec_path=path, overrides=overrides)
    trainer = config.lightning
    rays: dict[str, Any] = {"lightning.plugins": [*as_list(trainer.get("plugins")), ENVIRONMENT]}
    if trainer.get("strategy") in REPLACED_STRATEGIES:
        rays["lightning.strategy"] = STRATEGY
    # The absolute folder: Ray gives each worker another working directory.
    settings = {"artifacts_dir": str(config.artifacts_dir), "resume_from_latest": True}
    texts = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    texts += [f"{name}={json.dumps(value)}" for name, value in rays.items()]
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
    takes_back = _preemption_notice()
    options = RunOptions(
        spec_path=path,
        overrides=(*overrides, *size),
        stop_check=lambda: "preempted" if takes_back.is_set() else None,
    )
    _, error = attempt_job(options)
    is_preempted = isinstance(error, TrainingCanceled) and error.reason == "preempted"
    if is_preempted and takes_back.wait(NOTICE_PATIENCE_S):
        # Ray counts an exception as a failure of the run, also now, and takes a return for its end. It ends this
        # worker when the node's time is over.
        log.warning("the checkpoint is saved; waiting for Ray to move the run")
        threading.Event().wait()
    if error is not None and not _is_final(error):
        raise error


def _preemption_notice() -> threading.Event:
    """Return an event that is set once Ray has announced that it takes back a node of this run.

    Asking Ray is a barrier of all workers. Therefore a thread of each worker asks, and not the training.
    """
    import ray.train

    takes_back = threading.Event()
    # Ray 2.60 has it, and its older API for Train does not.
    read: Callable[[], object] | None = getattr(ray.train, "get_preemption_info", None)

    def ask(read: Callable[[], object]) -> None:
        try:
            while read() is None:
                takes_back.wait(PREEMPTION_POLL_S)
        except Exception as error:  # noqa: BLE001  # of the actor that connects the workers, for example
            log.warning("Ray's notices of preemption are not read any more: %s", safe_str(error))
        else:
            takes_back.set()

    if read is not None:
        started(threading.Thread(target=ask, args=(read,), name="genlight-ray-preemption", daemon=True))
    return takes_back


def _is_final(error: BaseException) -> bool:
    """Whether its user or its limits ended the run, so that Ray must not start it again."""
    return isinstance(error, TrainingCanceled) and error.reason != "preempted"


def _agree(node_rank: int) -> tuple[int, str]:
    """Return the number of nodes, and a name for this launch of all ranks. Collective, in the group of Ray."""
    import torch.distributed as dist

    ranks: list[Any] = [(node_rank, secrets.token_hex(8))]
    if dist.is_available() and dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (node_rank, secrets.token_hex(8)))
    return 1 + max(node for node, _ in ranks), ranks[0][1]
