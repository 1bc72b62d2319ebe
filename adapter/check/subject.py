"""The class under test, its data, and how it is run for a few steps under Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from ...callbacks.checkpoint import Checkpoint
from ..contract.types import TrainerPlugin, TrainingJobSpec
from ..feed.mock import MockDataModule
from ..module.module import ContractModule
from ..module.plugin_loading import load_trainer_plugin
from .isolation import WithoutDropout, quiet, seeded
from .snapshot import Snapshot, snapshot

__all__ = ["Subject", "Trained"]


@dataclass(frozen=True)
class Subject:
    """A trainer class and what it is fed with."""

    import_path: str
    batches: tuple[Any, ...]
    """Raw batches, one for each step; twice as many as `steps`. None has a class with ``rollout`` collect its own."""
    steps: int
    """Half of a whole run: where it is interrupted."""
    search_path: tuple[str, ...] = ()
    hyperparams: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def make(self) -> TrainerPlugin:
        """A new trainer."""
        return load_trainer_plugin(self.import_path, search_path=self.search_path)

    def job(self) -> TrainingJobSpec:
        """The job of a whole run; its checkpoints are made by the checks."""
        hyperparams = dict(self.hyperparams)
        return TrainingJobSpec(run_id="check", max_steps=2 * self.steps, metric_every=0, hyperparams=hyperparams)

    def train(
        self,
        *,
        batches: Sequence[Any] | None = None,
        at_step: Callable[[int, ContractModule], None] | None = None,
        stop_after: int | None = None,
        save_to: Path | None = None,
        resume_from: Path | None = None,
        bf16: bool = False,
        dropout: bool = True,
        **trainer_arguments: Any,
    ) -> Trained:
        """Train a new instance, from the same seed each time, on the CPU.

        Args:
            batches: Raw batches; None takes those of the subject. Without any the class collects its own.
            at_step: Called with the completed steps and the module: after each step, and before the first of this run.
            stop_after: Leave after so many steps, though the job asks for more.
            save_to: Folder for a checkpoint of the step at which the run is left.
            resume_from: Record of a checkpoint.
            bf16: Whether to use bf16-mixed instead of fp32.
            dropout: Whether dropout layers drop anything.
            trainer_arguments: For Lightning's trainer.
        """
        batches = self.batches if batches is None else batches
        module = ContractModule(self.make(), self.job())
        watch = _Watch(at_step, stop_after)
        callbacks: list[pl.Callback] = [watch]
        if not dropout:
            callbacks.append(WithoutDropout())
        if save_to is not None:
            callbacks.append(Checkpoint(save_to, every_n_steps=self.steps, save_final=False, keep_last=None))
        with quiet(), seeded(self.seed):
            trainer = pl.Trainer(
                **{"accelerator": "cpu", "devices": 1, **trainer_arguments},
                plugins=[MixedPrecision("bf16-mixed", "cpu") if bf16 else Precision()],
                max_steps=2 * self.steps,
                max_epochs=1 if batches else -1,
                callbacks=callbacks,
                logger=False,
                enable_checkpointing=save_to is not None,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                limit_val_batches=0,
            )
            data = MockDataModule(list(batches)) if batches else None
            trainer.fit(module, datamodule=data, ckpt_path=None if resume_from is None else str(resume_from))
        return Trained(module, trainer, watch.rollouts)


@dataclass(frozen=True)
class Trained:
    """A module after its training."""

    module: ContractModule
    trainer: pl.Trainer
    rollouts: int = 0
    """How many were begun."""

    def reached(self, *kinds: str) -> Snapshot:
        """What the class has at the end, of these kinds alone; a collective where it is sharded."""
        module = self.module
        return snapshot(module.contract_state, module.plugin, kinds=kinds, whole=True, host=module)


class _Watch(pl.Callback):
    def __init__(self, at_step: Callable[[int, ContractModule], None] | None, stop_after: int | None) -> None:
        self._at_step = at_step
        self._stop_after = stop_after
        self._begun = False
        self.rollouts = 0

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rollouts += 1

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if not self._begun and self._at_step is not None:
            self._at_step(trainer.global_step, pl_module)
        self._begun = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self._at_step is not None:
            self._at_step(trainer.global_step, pl_module)
        if self._stop_after is not None and trainer.global_step >= self._stop_after:
            trainer.should_stop = True
