"""The class under test and its data; trains it for a few steps under Lightning, in this process or on two ranks.

``python -m genlight.adapter.check.subject FOLDER RANK`` is one of the ranks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import override

from ...callbacks.checkpoint import Checkpoint, list_checkpoints
from ...callbacks.hook.hook import Hook
from ..contract.types import TrainerPlugin, TrainingJobSpec
from ..discovery.discover import Discovered
from ..feed.data_module import MockDataModule
from ..module.module import ContractModule
from ..module.plugin_loading import load_trainer_plugin, on_sys_path
from .isolation import describe_error, quiet, seeded, turn_off_dropout
from .snapshot import EVERYTHING, Snapshot, is_real, snapshot

WORLD_SIZE = 2
RANKS_WITHIN_S = 120.0
"""Seconds that two processes may take for all their jobs."""
RESUMED = " resumed"
"""Appended to the name of a training; results under that name are from the same training, resumed half-way."""
SHARDED = "sharded"
"""The job that runs under FSDP 2 instead of DDP."""
REFUSED = "refused"
"""A training that could not run has the snapshot ``{REFUSED: {REFUSED: reason}}``."""


class Observer(Hook):
    """Observes a training before its first step and after each step, before other callbacks report or save the step.

    Args:
        at_step: Called with the number of completed steps and the module.
        keep: Whether to take snapshots.
        stop_after: End the training after this many steps. The step limit of the job stays larger, because schedules
            use it.
        dropout: Whether dropout is on. Ranks draw different numbers for it, and these would hide other
            differences.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"
    module: ContractModule

    def __init__(
        self,
        at_step: Callable[[int, ContractModule], None] = lambda *_: None,
        *,
        keep: bool = False,
        stop_after: int | None = None,
        dropout: bool = True,
    ) -> None:
        self.at_step, self.keep, self.stop_after, self.dropout = at_step, keep, stop_after, dropout
        self.rollouts = 0
        """Number of rollouts that began."""
        self.snapshots: dict[int, Snapshot] = {}
        """Snapshots before the first step of this run and after each step, by step; only with `keep`."""
        self.metrics: list[dict[str, float]] = []
        """Metrics of each step; only with `keep`."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.module = pl_module
        if not self.dropout:
            turn_off_dropout(pl_module.modules())

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.keep:
            self.snapshots[trainer.global_step] = self.take_snapshot()
        self.at_step(trainer.global_step, pl_module)

    def on_rollout_start(self, *_: Any) -> None:
        """Count the rollout."""
        self.rollouts += 1

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)
        if self.keep:
            self.metrics.append(pl_module.metrics())
        if self.stop_after is not None and trainer.global_step >= self.stop_after:
            trainer.should_stop = True

    @property
    def discovered(self) -> Discovered:
        """The objects that the class built."""
        assert self.module.discovered is not None
        return self.module.discovered

    def take_snapshot(self, *kinds: str) -> Snapshot:
        """Return a snapshot of the class, of these kinds or of all. Collective if the class is sharded."""
        module = self.module
        return snapshot(module.contract_state, module.plugin, kinds=kinds or EVERYTHING, gather=True, host=module)


@dataclass(frozen=True)
class Subject:
    """A trainer class and its data."""

    import_path: str
    batches: tuple[Any, ...]
    """Raw batches, one for each of the ``2 * steps`` steps of a run. Empty if the class makes them by ``rollout``."""
    steps: int
    """Half of the steps of a run; a run that is resumed was interrupted after this step."""
    search_path: tuple[str, ...] = ()
    hyperparams: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    make_data: Callable[[], pl.LightningDataModule | None] | None = None
    """Makes the data module of the job, or returns None if the class has its own loader. Without this, `batches` are
    used even with `as_in_job`."""
    precision: str = "32-true"
    """Precision of the job."""

    def make(self) -> TrainerPlugin:
        """Return a new trainer."""
        return load_trainer_plugin(self.import_path, search_path=self.search_path)

    def train(
        self,
        observer: Observer,
        *,
        batches: Sequence[Any] | None = None,
        at_update: Callable[[Optimizer], None] = lambda _: None,
        save_to: Path | None = None,
        resume_from: Path | None = None,
        as_in_job: bool = False,
        **trainer_arguments: Any,
    ) -> Observer:
        """Train a new instance on the CPU, always from the same seed; return `observer`.

        Args:
            observer: A callback of the training.
            batches: Raw batches; None uses the batches of the subject. If there are none, the class collects its own.
            at_update: Called with an optimizer after each of its steps; an exception ends the training.
            save_to: Folder for a checkpoint of the step at which a run is interrupted.
            resume_from: Record of a checkpoint.
            as_in_job: Whether to use the job's own loader with its workers, and the job's precision. Epochs are shorter
                than the run, and the interruption is in the middle of an epoch.
            trainer_arguments: For Lightning's trainer.
        """
        batches = self.batches if batches is None else batches
        max_steps = 2 * self.steps
        job = TrainingJobSpec(run_id="check", max_steps=max_steps, metric_every=0, hyperparams=dict(self.hyperparams))
        module = ContractModule(self.make(), job)
        callbacks: list[pl.Callback] = [observer]
        epochs: dict[str, Any] = {"max_epochs": 1 if batches else -1}
        make_data = self.make_data if as_in_job else None
        if make_data is not None:
            epochs = {"max_epochs": -1, "limit_train_batches": max(1, self.steps - 2)}
        if as_in_job:
            trainer_arguments = {"plugins": [_plugin_of(self.precision)], **trainer_arguments}
        if save_to is not None:
            callbacks.append(Checkpoint(save_to, every_n_steps=self.steps, save_final=False, keep_last=None))
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: at_update(optimizer))
        with ExitStack() as stack:
            stack.callback(handle.remove)
            stack.enter_context(quiet())
            stack.enter_context(seeded(self.seed))
            trainer = pl.Trainer(
                **{"accelerator": "cpu", "devices": 1, "plugins": [Precision()], **trainer_arguments},
                max_steps=max_steps,
                **epochs,
                callbacks=callbacks,
                logger=False,
                enable_checkpointing=save_to is not None,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                limit_val_batches=0,
            )
            stack.enter_context(on_sys_path([Path(folder) for folder in self.search_path]))
            data: pl.LightningDataModule | None = MockDataModule(list(batches)) if batches else None
            if make_data is not None:
                data = make_data()
            trainer.fit(module, datamodule=data, ckpt_path=None if resume_from is None else str(resume_from))
        return observer


def _plugin_of(precision: str) -> Precision:
    """Return the plugin for a job's precision, on the CPU."""
    if precision in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(precision, "cpu")  # type: ignore[arg-type]
    if precision in ("16-true", "bf16-true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]
    return DoublePrecision() if precision == "64-true" else Precision()


class RanksError(RuntimeError):
    """A rank failed, or the ranks did not finish in time."""


def train_on_ranks(subject: Subject, jobs: dict[str, list[list[Any]]], folder: Path) -> dict[str, list[Snapshot]]:
    """Train on two processes with gloo, without dropout.

    The job called `SHARDED` trains under FSDP 2, the others under DDP. It must be the last one, because an error in it
    leaves the ranks at different points.

    Args:
        subject: What to train.
        jobs: The batches of each rank, by name of the job.
        folder: A folder for messages between the processes; nothing else may use it.

    Returns:
        The weights and optimizer states of each rank, by name of the job; if FSDP 2 cannot train the class, only the
        reason, under `REFUSED`. Every job is also resumed half-way, except for ``same`` if there is ``halves``; the
        names of these results end with `RESUMED`.

    Raises:
        RanksError: A rank failed, or took too long; the message holds the trainer's own error if there is one.
    """
    (folder / "request.pkl").write_bytes(pickle.dumps((replace(subject, make_data=None), jobs)))
    ranks = [start_rank(folder, rank) for rank in range(WORLD_SIZE)]
    try:
        _wait(ranks, time.monotonic() + RANKS_WITHIN_S)
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


def run_rank(folder: Path, rank: int) -> int:
    """Run all jobs as one rank; return the exit code."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that the ranks exist already
    subject, jobs = pickle.loads((folder / "request.pkl").read_bytes())  # noqa: S301  # our own parent wrote it
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    results: dict[str, Any] = {}
    try:
        for name, batches in jobs.items():
            # A mock feed gives batches to the ranks in turn; in this order each rank gets its own.
            dealt = [batch for pair in zip(*batches, strict=True) for batch in pair]
            results[name] = _train_rank(name, subject, dealt, save_to=folder / name)
            if name != "same" or "halves" not in jobs:
                results[f"{name}{RESUMED}"] = _resume_rank(name, subject, dealt, folder / name)
    except Exception as error:  # noqa: BLE001  # whatever the trainer class raises is reported by the parent
        traceback.print_exc()
        (folder / f"rank{rank}.error").write_text(describe_error(error))
        return 1
    torch.save(results, folder / f"rank{rank}.pt")
    with suppress(RuntimeError):  # the other rank may be gone
        dist.destroy_process_group()
    return 0


def _resume_rank(name: str, subject: Subject, batches: list[Any], folder: Path) -> Mapping[str, Any]:
    """Resume from the first checkpoint in `folder`; return the state of this rank, or the error."""
    saved = min((each for each in list_checkpoints(folder) if each.record), default=None, key=lambda each: each.path)
    if saved is None:
        return {REFUSED: {REFUSED: "no checkpoint was saved"}}
    try:
        return _train_rank(name, subject, batches, save_to=folder, resume_from=saved.path)
    except Exception as error:  # noqa: BLE001  # whatever a resume raises is the finding
        return {REFUSED: {REFUSED: describe_error(error)}}


def _train_rank(name: str, subject: Subject, batches: list[Any], **checkpoints: Any) -> Mapping[str, Any]:
    """Train; return the state of this rank, unsharded under FSDP 2, or the reason why FSDP 2 cannot train the class."""
    strategy: Any = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
    if name == SHARDED:
        strategy = ModelParallelStrategy(WORLD_SIZE, 1, process_group_backend="gloo")
        strategy.cluster_environment = LightningEnvironment()
    try:
        ranks: Any = {"devices": WORLD_SIZE, "strategy": strategy}
        observer = subject.train(Observer(dropout=False), batches=batches, **checkpoints, **ranks)
        # In two snapshots, because one with "value" has the state of a wrapper around an optimizer only there.
        state = observer.take_snapshot("weight", "optimizer state")
        values = observer.take_snapshot("value")["value"]
    except Exception as error:
        if name != SHARDED:
            raise
        return {REFUSED: {REFUSED: describe_error(error)}}
    numbers = {path: value for path, value in values.items() if is_real(value)}
    return {**state.values, "value": numbers}


if __name__ == "__main__":
    # The pickled subject has classes of the imported module, which are not the classes of `__main__`.
    from genlight.adapter.check import subject as imported

    sys.exit(imported.run_rank(Path(sys.argv[1]), int(sys.argv[2])))
