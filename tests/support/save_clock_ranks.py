"""One rank of the test of saves by the clock: ``save_clock_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from rank_environment import Ranks

from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint import policy
from genlight.callbacks.hook import cadence

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Net(pl.LightningModule):
    """Each of its steps takes 10 seconds on rank 0, and no time on rank 1."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if RANK == 0:
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
    policy.time = cadence.time = SimpleNamespace(monotonic=lambda: clock.now)
    trainer = pl.Trainer(
        strategy=DDPStrategy(cluster_environment=Ranks(RANK, WORLD_SIZE), process_group_backend="gloo"),
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_steps=30,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Net(clock), torch.utils.data.DataLoader(list(range(30))))
    return checkpoint.steps


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=WORLD_SIZE)
    found = {
        "minutes": train(Noting(dirpath=FOLDER / "minutes", every_minutes=2)),
    }
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
