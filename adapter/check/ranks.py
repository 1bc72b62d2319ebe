"""Two processes on one machine that train together: ``python -m genlight.adapter.check.ranks FOLDER RANK``."""

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
from .subject import Observer, Subject

WORLD_SIZE = 2
RESUMED = " resumed"
"""Suffix of the name of a job that was resumed half-way."""
SHARDED = "sharded"
"""The job that runs under FSDP 2 instead of DDP."""
REFUSED = "refused"
"""Kind and path of the reason in the snapshot of a job that could not run."""


class RanksError(RuntimeError):
    """A rank failed, or the ranks did not finish in time."""


def train_on_ranks(
    subject: Subject, jobs: dict[str, list[list[Any]]], folder: Path, *, timeout_s: float = 120.0
) -> dict[str, list[Snapshot]]:
    """Train on two processes with gloo: under DDP, and under FSDP 2 for the job called `SHARDED`, the last one.

    Dropout is off.

    Args:
        subject: What to train.
        jobs: The batches of each rank, by name of the job.
        folder: A folder for messages between the processes; nothing else may use it.
        timeout_s: Time limit for all jobs together, in seconds.

    Returns:
        The weights and optimizer states of each rank, by name of the job; if FSDP 2 cannot train the class, only the
        reason, under `REFUSED`. Runs with halved rows and sharded runs are also resumed half-way; the name of these
        results ends with `RESUMED`.

    Raises:
        RanksError: A rank failed, or the time is over; the message holds the trainer's own error if there is one.
    """
    (folder / "request.pkl").write_bytes(pickle.dumps((replace(subject, make_data=None), jobs)))
    ranks = [start_rank(folder, rank) for rank in range(WORLD_SIZE)]
    try:
        _wait(ranks, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    # If one rank fails, the others fail too. The first failure has the reason.
    errors = sorted(folder.glob("rank*.error"), key=lambda file: file.stat().st_mtime_ns)
    if errors:
        raise RanksError(f"rank {errors[0].stem.removeprefix('rank')}: {errors[0].read_text()}")
    for rank, process in enumerate(ranks):
        if process.returncode != 0:
            output = _log(folder, rank).read_text(errors="replace")
            raise RanksError(f"rank {rank} ended with code {process.returncode}: {output[-500:]}")
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]
    return {name: [Snapshot(result[name]) for result in results] for name in results[0]}


def start_rank(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """Start one rank. It reads its request from `folder` and writes its output there."""
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
    """Wait until all ranks have ended, or one has failed; the others would wait for that one forever."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            return
        if time.monotonic() > deadline:
            raise RanksError(
                "the ranks did not finish in time: one of them made fewer backward calls than the other, so that they "
                "wait for each other, or this machine is too busy"
            )
        time.sleep(0.05)


def main(folder: Path, rank: int) -> int:
    """Run all jobs as one rank; return the exit code."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that the ranks exist already
    subject, jobs = pickle.loads((folder / "request.pkl").read_bytes())  # noqa: S301  # our own parent wrote it
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    results: dict[str, Any] = {}
    try:
        for name, batches in jobs.items():
            # A mock feed deals out batches in turn; in this order each rank gets its own.
            dealt = [batch for pair in zip(*batches, strict=True) for batch in pair]
            results[name] = _train(name, subject, dealt, save_to=folder / name)
            if name != "same" or "halves" not in jobs:
                results[f"{name}{RESUMED}"] = _resume(name, subject, dealt, folder / name)
    except Exception as error:  # noqa: BLE001  # whatever the trainer class raises is reported by the parent
        traceback.print_exc()
        (folder / f"rank{rank}.error").write_text(f"{type(error).__name__}: {error}")
        return 1
    torch.save(results, folder / f"rank{rank}.pt")
    with contextlib.suppress(RuntimeError):  # the other rank may be gone
        dist.destroy_process_group()
    return 0


def _resume(name: str, subject: Subject, batches: list[Any], folder: Path) -> Mapping[str, Any]:
    """Resume from the first checkpoint in `folder`; return the state of this rank, or the error."""
    saved = min((each for each in list_checkpoints(folder) if each.record), default=None, key=lambda each: each.path)
    if saved is None:
        return {REFUSED: {REFUSED: "no checkpoint was saved"}}
    try:
        return _train(name, subject, batches, save_to=folder, resume_from=saved.path)
    except Exception as error:  # noqa: BLE001  # whatever a resume raises is the finding
        return {REFUSED: {REFUSED: f"{type(error).__name__}: {error}"}}


def _train(name: str, subject: Subject, batches: list[Any], **checkpoints: Any) -> Mapping[str, Any]:
    """Train; return the state of this rank, unsharded under FSDP 2, or the reason why FSDP 2 cannot train the class."""
    strategy: Any = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
    if name == SHARDED:
        strategy = ModelParallelStrategy(WORLD_SIZE, 1, process_group_backend="gloo")
        strategy.cluster_environment = LightningEnvironment()
    try:
        ranks: Any = {"devices": WORLD_SIZE, "strategy": strategy}
        observer = subject.train(Observer(dropout=False), batches=batches, **checkpoints, **ranks)
        # Separately: together with "value", a wrapper's state would not count as optimizer state.
        state = observer.take_snapshot("weight", "optimizer state")
        values = observer.take_snapshot("value")["value"]
    except Exception as error:
        if name != SHARDED:
            raise
        return {REFUSED: {REFUSED: f"{type(error).__name__}: {error}"}}
    numbers = {path: value for path, value in values.items() if _is_number(value)}
    return {**state.values, "value": numbers}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
