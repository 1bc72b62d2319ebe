"""A short training of a trainer class, which can stop early and go on from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.callbacks import Checkpoint

__all__ = ["STEPS", "Batches", "fit"]

STEPS = 6


class Batches:
    """Knows where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        for step in range(self.position, STEPS):
            self.position = step + 1
            generator = torch.Generator().manual_seed(step)
            yield torch.randn(4, 2, generator=generator, device="cpu", dtype=torch.float32)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def fit(folder: Path, plugin: Any, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """The weights of `plugin` after `steps` steps on batches of two columns; checkpoints are in `folder`."""
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Checkpoint(folder, asynchronous=False)],
    )
    module = ContractModule(plugin, TrainingJobSpec("resumed", steps))
    trainer.fit(module, Batches(), **options)
    return module.state_dict()
