"""One rank of the test of saves by the clock: ``save_clock_ranks.py RANK WORLD_SIZE FOLDER``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch

from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint import budget, policy
from genlight.callbacks.hook import cadence
from support.rank import Rank

RANK = Rank.of_command_line()


class Net(pl.LightningModule):
    """Each of its steps takes 10 seconds on rank 0, and no time on rank 1."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if RANK.number == 0:
            self.clock.now += 10.0
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Noting(Checkpoint):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(save_final=False, keep_last=None, **arguments)
        self.steps: list[int] = []

    def save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, **options: Any) -> Path:
        self.steps.append(trainer.global_step)
        return super().save(trainer, pl_module, **options)


def train(checkpoint: Noting) -> list[int]:
    clock = SimpleNamespace(now=1000.0)
    budget.time = cadence.time = policy.time = SimpleNamespace(monotonic=lambda: clock.now)
    trainer = RANK.trainer(checkpoint, max_steps=30)
    trainer.fit(Net(clock), torch.utils.data.DataLoader(list(range(30))))
    return checkpoint.steps


if __name__ == "__main__":
    with RANK.group():
        RANK.leave({"minutes": train(Noting(dirpath=RANK.folder / "minutes", every_minutes=2))})
