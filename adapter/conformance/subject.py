"""The class under test, its data, and how it is run for a few steps under Lightning."""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from ...callbacks.checkpoint import Checkpoint
from ..contract.types import TrainerPlugin, TrainingJobSpec
from ..feed.mock import MockDataModule
from ..module.module import ContractModule
from ..module.plugin_loading import load_trainer_plugin

__all__ = ["Subject", "Trained"]


@dataclass(frozen=True)
class Subject:
    """A trainer class and what it is fed with."""

    import_path: str
    batches: tuple[Any, ...]
    """Raw batches, one for each step; twice as many as `steps`."""
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
        return TrainingJobSpec(
            run_id="check", max_steps=2 * self.steps, metric_every=0, hyperparams=dict(self.hyperparams)
        )

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
            batches: Raw batches; None takes those of the subject.
            at_step: Called with the completed steps and the module: after each step, and before the first of this run.
            stop_after: Leave after so many steps, though the job asks for more.
            save_to: Folder for a checkpoint of the step at which the run is left.
            resume_from: Record of a checkpoint.
            bf16: Whether to use bf16-mixed instead of fp32.
            dropout: Whether dropout layers drop anything.
            trainer_arguments: For Lightning's trainer.
        """
        module = ContractModule(self.make(), self.job())
        callbacks: list[pl.Callback] = [_Watch(at_step, stop_after)]
        if not dropout:
            callbacks.append(_WithoutDropout())
        if save_to is not None:
            callbacks.append(Checkpoint(save_to, every_n_steps=self.steps, save_final=False, keep_last=None))
        with _quiet(), _seeded(self.seed):
            trainer = pl.Trainer(
                **{"accelerator": "cpu", "devices": 1, **trainer_arguments},
                plugins=[MixedPrecision("bf16-mixed", "cpu") if bf16 else Precision()],
                max_steps=2 * self.steps,
                max_epochs=1,
                callbacks=callbacks,
                logger=False,
                enable_checkpointing=save_to is not None,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                limit_val_batches=0,
            )
            data = MockDataModule(list(self.batches if batches is None else batches))
            trainer.fit(module, datamodule=data, ckpt_path=None if resume_from is None else str(resume_from))
        return Trained(module, trainer)


@dataclass(frozen=True)
class Trained:
    """A module after its training."""

    module: ContractModule
    trainer: pl.Trainer

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of all modules that were found, and bare parameters, by path."""
        discovered = self.module.discovered
        assert discovered is not None
        tensors = {
            f"{found.path}.{name}": tensor.detach().clone()
            for found in discovered.modules
            for module in [_unwrapped(found.value)]
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        trained = {id(tensor) for tensor in discovered.updated()}
        bare = [*discovered.parameters, *(found for found in discovered.tensors if id(found.value) in trained)]
        return tensors | {found.path: found.value.detach().clone() for found in bare}


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module in a DistributedDataParallel of the trainer's own, which has it on several ranks alone."""
    return module.module if isinstance(module, DistributedDataParallel) else module


class _Watch(pl.Callback):
    def __init__(self, at_step: Callable[[int, ContractModule], None] | None, stop_after: int | None) -> None:
        self._at_step = at_step
        self._stop_after = stop_after
        self._begun = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if not self._begun and self._at_step is not None:
            self._at_step(trainer.global_step, pl_module)
        self._begun = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self._at_step is not None:
            self._at_step(trainer.global_step, pl_module)
        if self._stop_after is not None and trainer.global_step >= self._stop_after:
            trainer.should_stop = True


class _WithoutDropout(pl.Callback):
    """Which numbers a rank draws is its own affair, and hides whether all else agrees."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
                module.dropout = 0.0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says about every training; a check says what matters."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "genlight")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Begin with the same random numbers, and leave those of the caller as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
