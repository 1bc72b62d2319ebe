"""A short training of a trainer class that can stop early and continue from its checkpoint."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint
from support.trainer_class import Counts
from support.trainers import quiet_trainer

STEPS = 6


class Batches:
    """An iterable that keeps its position."""

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


def seed(number: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Sees(Counts):
    """Keeps the rows that it saw, and draws a number in each step."""

    def setup(self, ctx: Any) -> None:
        seed(5)

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {"seen": []}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["seen"].append([*batch.flatten().tolist(), torch.rand(()).item()])
        return StepResult({"loss": 0.0})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"seen": list(state["seen"])}


class PlainSees(pl.LightningModule):
    """Does the same in Lightning's own loop, and notes the epoch and its weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        weights = self.body.weight.flatten().tolist()
        self.seen.append([*batch.flatten().tolist(), torch.rand(()).item(), self.trainer.current_epoch, *weights])
        return self.body(batch.flatten()[:2].float()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Trains(Counts):
    """A trainer class without state that trains ``net`` with ``optimizer``; a subclass builds them."""

    def setup(self, ctx: Any) -> None:
        torch.manual_seed(0)

    def outputs(self, batch: Any, state: Any) -> torch.Tensor:
        """Size of the network."""
        outputs: torch.Tensor = state["net"](batch)
        return outputs

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        loss = (self.outputs(batch, state) - batch.sum(1, keepdim=True)).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {}


class ChangesAtStepThree(Trains):
    """A trainer class that changes what it trains at its third step; it stores only a number about that."""

    adds_in_load = True
    """Whether it does so in ``load_state_dict`` as well."""

    def change(self, state: Any) -> None:
        """Change the state at that step."""
        raise NotImplementedError

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["step"] += 1
        if state["step"] == 3:
            self.change(state)
        return super().train_step(batch, state, ctx)

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"step": state["step"]}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["step"] = payload["step"]
        if payload["step"] >= 3 and self.adds_in_load:
            self.change(state)


def trainer_with_checkpoints(folder: Path, steps: int, **options: Any) -> pl.Trainer:
    """A quiet Lightning trainer of the CPU that saves into `folder`."""
    return quiet_trainer(Checkpoint(folder, asynchronous=False), max_steps=steps, default_root_dir=folder, **options)


def fit(folder: Path, plugin: Any, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """The weights of `plugin` after `steps` steps on batches of two columns; checkpoints are in `folder`."""
    trainer = trainer_with_checkpoints(folder, steps)
    module = ContractModule(plugin, TrainingJobSpec("resumed", steps))
    trainer.fit(module, Batches(), **options)
    return module.state_dict()


def rows_seen(folder: Path, steps: int, data: Any, kind: type[Any] = Sees, **options: Any) -> list[list[float]]:
    """Train up to `steps`, from the final checkpoint in `folder` if there is one; return what `kind` saw."""
    seed(7)
    is_plain = issubclass(kind, pl.LightningModule)
    module = kind() if is_plain else ContractModule(kind(), TrainingJobSpec("r", steps))
    trainer = trainer_with_checkpoints(folder, steps, max_epochs=-1, **options)
    final = folder / "final.json"
    trainer.fit(module, data, ckpt_path=str(final) if final.exists() else None)
    seen: list[list[float]] = module.seen if is_plain else module.contract_state["seen"]
    return seen
