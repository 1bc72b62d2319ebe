"""One rank of the tests of diagnosis; started once per rank: ``diagnosis_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from genlight.adapter import ContractModule
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Diagnosis
from support.rank import Rank
from support.trainer_class import Trains

RANK = Rank.of_command_line()
STEPS = 12
SLEEP_S = 0.25


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of_batch(model: nn.Module, batch: torch.Tensor, fault: str) -> torch.Tensor:
    """Slow down a step or break a batch on rank 1."""
    if RANK.number == 1 and fault == "sleeps":
        time.sleep(SLEEP_S)
    if RANK.number == 1 and fault == "nan":
        batch = batch * float("nan")
    return (model(batch) - 1).square().mean()


class Plain(pl.LightningModule):
    """Trains as Lightning's users do."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.net, self.fault = net(), fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of_batch(self.net, batch, self.fault)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Contract(Trains):
    """The same as a trainer class."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def model(self) -> nn.Module:
        return net()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    def loss(self, batch: torch.Tensor, state: Any) -> torch.Tensor:
        return loss_of_batch(state["model"], batch, self.fault)


def faults_of(module: pl.LightningModule, fault: str, name: str) -> dict[str, Any]:
    """The faults that this rank knows of after a training."""
    generator = torch.Generator().manual_seed(0 if fault == "shared" else RANK.number)
    batches = [torch.randn(3, 4, generator=generator) for _ in range(STEPS)]
    diagnosis = Diagnosis(6, path=RANK.folder / f"{name} {fault}.jsonl")
    strategy = RANK.strategy("sharded", save_distributed_checkpoint=False) if name == "sharded" else "ddp"
    trainer = RANK.trainer(diagnosis, strategy=strategy, max_steps=STEPS, max_epochs=1)
    with RANK.group(f"store {name} {fault}"):
        trainer.fit(module, BatchStream(batches))
    return {kind: [found.text, found.step, dict(found.figures)] for kind, found in diagnosis.faults.items()}


def main() -> None:
    found = {}
    for fault in ("none", "sleeps", "nan", "shared"):
        found[f"contract {fault}"] = faults_of(ContractModule(Contract(fault)), fault, "contract")
        found[f"plain {fault}"] = faults_of(Plain(fault), fault, "plain")
    found["sharded nan"] = faults_of(ContractModule(Contract("nan")), "nan", "sharded")
    RANK.leave(found)


if __name__ == "__main__":
    main()
