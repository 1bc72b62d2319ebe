"""The faults of a rehearsal: a Lightning callback that breaks its own process."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from ...callbacks.checkpoint.format.record import is_temporary, record_paths
from ..module.module import ContractModule
from ..plumbing.threads import DaemonThreads

Kind = Literal["kill", "kill while saving", "kill after saving", "stop", "pause", "full disk"]

POLL_S = 0.0002
"""Seconds between two checks for the files of a checkpoint."""


@dataclass(frozen=True)
class Fault:
    """One fault of a rehearsal."""

    kind: Kind
    """``kill``: SIGKILL at a random moment of the step. ``kill while saving``: SIGKILL as soon as the files of
    another checkpoint appear, from this step on. ``kill after saving``: SIGKILL once there are two checkpoints.
    ``stop``: SIGTERM. ``pause``: SIGSTOP. ``full disk``: from this step on, files can only grow to half of the largest
    checkpoint file so far."""
    step: int
    """The step in which it happens; steps count from 1."""
    rank: int = 0


def marker(folder: Path, number: int) -> Path:
    """Return the path of the file that is made when the fault of this number happens."""
    return folder / f"fault-{number}"


class Faults(pl.Callback):
    """Break this process in given steps, each fault once in a rehearsal.

    Args:
        folder: The folder of the rehearsal.
        checkpoints: The folder of the run's checkpoints.
        faults: The arguments of each `Fault`.
    """

    def __init__(self, folder: str, checkpoints: str, faults: Iterable[Mapping[str, Any]] = ()) -> None:
        self._folder, self._checkpoints = Path(folder), Path(checkpoints)
        self._faults = [Fault(**fault) for fault in faults]
        self._armed: set[int] = set()
        self._threads = DaemonThreads(len(self._faults), "genlight-fault")
        self._began, self._step_s = time.perf_counter(), 0.0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, ContractModule)
        step, now = pl_module.completed_steps + 1, time.perf_counter()
        self._step_s, self._began = now - self._began, now
        for number, fault in enumerate(self._faults):
            is_due = fault.rank == trainer.global_rank and fault.step <= step and number not in self._armed
            if is_due and not marker(self._folder, number).exists():
                self._armed.add(number)
                self._cause(fault.kind, marker(self._folder, number).touch)

    def _cause(self, kind: Kind, note: Callable[[], None]) -> None:
        """Cause a fault; `note` records immediately before it that it has happened."""
        saved = self._checkpoints
        if kind == "kill while saving":
            # Not during the first save: without a checkpoint, the next start would begin at step 0 again.
            self._kill_once(lambda: any(map(is_temporary, os.listdir(saved))) and bool(record_paths(saved)), note)
        elif kind == "kill after saving":
            self._kill_once(lambda: len(record_paths(saved)) > 1, note)
        elif kind == "kill":
            # Not the global generator, so that the training draws the same numbers as without a fault.
            delay = random.SystemRandom().uniform(0, self._step_s)
            self._threads.submit(lambda: _kill(note, delay))
        elif kind == "full disk":
            note()
            largest = max((path.stat().st_size for path in saved.rglob("*.safetensors")), default=0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, resource.RLIM_INFINITY))
        else:
            note()
            os.kill(os.getpid(), signal.SIGTERM if kind == "stop" else signal.SIGSTOP)

    def _kill_once(self, is_due: Callable[[], bool], note: Callable[[], None]) -> None:
        """Watch from a thread, and kill this process as soon as `is_due` returns True."""

        def watch() -> None:
            while not is_due():
                time.sleep(POLL_S)
            _kill(note)

        self._threads.submit(watch)


def _kill(note: Callable[[], None], after_s: float = 0.0) -> None:
    time.sleep(after_s)
    note()
    os.kill(os.getpid(), signal.SIGKILL)
