"""Trainings that break off without a last checkpoint, as if the process was killed, and are started again."""

import contextlib
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.callbacks import Checkpoint, Hook
from genlight.callbacks.checkpoint import newest_valid
from genlight.callbacks.witness.entry import Proof
from support.resumed_fit import seed as set_seed
from support.trainer_class import Trains
from support.trainers import quiet_trainer


class Proofs(Hook):
    """Keeps the results of comparisons."""

    def __init__(self) -> None:
        self.found: list[Proof] = []

    def on_resume_proof(self, trainer: pl.Trainer, pl_module: pl.LightningModule, proof: Proof) -> None:
        self.found.append(proof)


class Broken(Exception):
    """Ends a training as a kill would: nothing is saved."""


class BreakOff(pl.Callback):
    """Breaks a training off before the step after `step`."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Broken


class Rows(Dataset[Any]):
    """Rows of two numbers with noise of every global generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.random() + torch.rand(())
        return torch.tensor([index / 40, 1.0]) + 0.1 * noise


def rows(**options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), 4, **{"shuffle": True, **options})


class Hosted(Trains):
    """A trainer class with dropout."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))


class Plain(pl.LightningModule):
    """A LightningModule with dropout and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


def attempt(
    folder: Path,
    module: Any,
    data: Any,
    *,
    until: int | None = None,
    steps: int = 24,
    seed: int | None = 7,
    callbacks: tuple[pl.Callback, ...] = (),
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> list[Proof]:
    """Train from the newest checkpoint in `folder`, and break off after the step `until`; return the comparisons."""
    if seed is not None:
        set_seed(seed)
    record, _ = newest_valid(folder)
    proofs = Proofs()
    checkpoint = Checkpoint(folder, **{"every_n_steps": 10, "asynchronous": False, **options})
    settings = {"max_steps": steps, "max_epochs": -1, "log_every_n_steps": 5, **(trainer or {})}
    fits = quiet_trainer(checkpoint, proofs, BreakOff(until), *callbacks, **settings)
    if not isinstance(module, pl.LightningModule):
        module = ContractModule(module, TrainingJobSpec("witnessed", steps))
    with contextlib.suppress(Broken):
        fits.fit(module, data, ckpt_path=None if record is None else str(record.path))
    return proofs.found


def attempts(folder: Path, make_module: Any, make_data: Any = rows, *, until: int = 17, **options: Any) -> list[Proof]:
    """Break a training off, start it again with other seeds, and return what the second attempt found."""
    assert attempt(folder, make_module(), make_data(), until=until, **options) == []
    return attempt(folder, make_module(), make_data(), **{**options, "seed": 8})
