"""Two processes of one machine that train together: ``python -m genlight.adapter.check.ranks FOLDER RANK``."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from ...callbacks.checkpoint import list_checkpoints
from .snapshot import Snapshot
from .subject import Subject, Watched

__all__ = ["REFUSED", "RESUMED", "SHARDED", "RanksError", "start_rank", "train_on_ranks"]

WORLD_SIZE = 2
RESUMED = " resumed"
"""What follows the name of a job whose run was resumed half-way."""
SHARDED = "sharded"
"""The job that is done by FSDP 2 instead of DDP."""
REFUSED = "refused"
"""The value in a snapshot where there is none."""


class RanksError(RuntimeError):
    """The ranks did not come to an end together."""


def train_on_ranks(
    subject: Subject, jobs: dict[str, list[list[Any]]], folder: Path, *, timeout_s: float = 120.0
) -> dict[str, list[Snapshot]]:
    """Train on two processes with gloo, under DDP or, for the job called `SHARDED`, which comes last, FSDP 2.

    Dropout layers drop nothing.

    Args:
        subject: What to train.
        jobs: By a name, the batches of each rank.
        folder: For the ranks' messages alone.
        timeout_s: How long all of it may take.

    Returns:
        By the job's name, the weights and optimizer states of each rank; if FSDP 2 cannot train the class, only the
        reason, under `REFUSED`. A run of rows in halves, and a sharded one, are also resumed half-way: these states
        have the job's name and `RESUMED`.

    Raises:
        RanksError: With the trainer's own error where there is one.
    """
    (folder / "request.pkl").write_bytes(pickle.dumps((replace(subject, make_data=None), jobs)))
    ranks = [start_rank(folder, rank) for rank in range(WORLD_SIZE)]
    try:
        _wait(ranks, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    # A rank that fails takes the others down; the rank that failed first has the reason.
    errors = sorted(folder.glob("rank*.error"), key=lambda file: file.stat().st_mtime_ns)
    if errors:
        raise RanksError(f"rank {errors[0].stem.removeprefix('rank')}: {errors[0].read_text()}")
    for rank, process in enumerate(ranks):
        if process.returncode != 0:
            said = _log(folder, rank).read_text(errors="replace")
            raise RanksError(f"rank {rank} ended with code {process.returncode}: {said[-500:]}")
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
    return {name: [Snapshot(result[name]) for result in results] for name in results[0]}


def start_rank(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """Start one rank, which reads its request from `folder` and writes what it says there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(rank)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all ranks have ended, or one of them badly: the others would wait for it for ever."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            return
        if time.monotonic() > deadline:
            raise RanksError(
                "the ranks did not come to an end in time: one of them made fewer backward calls than the other, so "
                "that they wait for each other, or this machine is too busy"
            )
        time.sleep(0.05)


def main(folder: Path, rank: int) -> int:
    """Do what one rank does; the exit code."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # by which Lightning sees that the ranks exist already
    subject, jobs = pickle.loads((folder / "request.pkl").read_bytes())  # noqa: S301  # our own parent wrote it
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    results: dict[str, Any] = {}
    try:
        for name, batches in jobs.items():
            # A mock feed deals its batches out in turn; each rank's own come back to it this way.
            dealt = [batch for pair in zip(*batches, strict=True) for batch in pair]
            results[name] = _trained(name, subject, dealt, save_to=folder / name)
            if name != "same" or "halves" not in jobs:
                results[f"{name}{RESUMED}"] = _resumed(name, subject, dealt, folder / name)
    except Exception as error:  # noqa: BLE001  # whatever the trainer class raises is reported by the parent
        traceback.print_exc()
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        return 1
    torch.save(results, folder / f"rank{rank}.pt")
    with contextlib.suppress(RuntimeError):  # the other rank may be gone
        dist.destroy_process_group()
    return 0


def _resumed(name: str, subject: Subject, batches: list[Any], folder: Path) -> Mapping[str, Any]:
    """The state of a rank whose training goes on from the first checkpoint in `folder`, or the error."""
    saved = min((each for each in list_checkpoints(folder) if each.record), default=None, key=lambda each: each.path)
    if saved is None:
        return {REFUSED: {REFUSED: "no checkpoint was saved"}}
    try:
        return _trained(name, subject, batches, save_to=folder, resume_from=saved.path)
    except Exception as error:  # noqa: BLE001  # whatever a resume raises is the finding
        return {REFUSED: {REFUSED: f"{type(error).__name__}: {error}"}}


def _trained(name: str, subject: Subject, batches: list[Any], **checkpoints: Any) -> Mapping[str, Any]:
    """The state of a rank after training; whole weights under FSDP 2, or the error that says why that cannot be."""
    strategy: Any = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
    if name == SHARDED:
        strategy = ModelParallelStrategy(WORLD_SIZE, 1, process_group_backend="gloo")
        strategy.cluster_environment = LightningEnvironment()
    try:
        ranks: Any = {"devices": WORLD_SIZE, "strategy": strategy}
        watched = subject.train(Watched(dropout=False), batches=batches, **checkpoints, **ranks)
        # Apart from the values, among which a wrapper's state would count, and not as that of its optimizer.
        reached = watched.reached("weight", "optimizer state")
        values = watched.reached("value")["value"]
    except Exception as error:
        if name != SHARDED:
            raise
        return {REFUSED: {REFUSED: f"{type(error).__name__}: {error}"}}
    numbers = {path: value for path, value in values.items() if _is_number(value)}
    return {**reached.values, "value": numbers}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
