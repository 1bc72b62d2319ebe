"""One rank of a run that kills itself in a step, and is started again; for ``test_killed_runs.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, ``ddp``, ``sharded`` or ``plain`` (a
LightningModule under DDP), the step after which all ranks kill themselves (0: none), a fault on rank one, and
``overlap`` to start from the older checkpoint.
"""

import logging
import os
import signal
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.callbacks.checkpoint import Checkpoint, newest_valid
from support.rank import Rank
from support.witnessed import Hosted, Plain, Proofs, Rows

STEPS = 14
OTHER_RATE = 9
"""The fault that trains with another learning rate."""


class Kills(pl.Callback):
    """Kills this process at the start of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.step and trainer.global_step == self.step:
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


class Noisy(Hosted):
    """Draws from NumPy's generator on rank one, as often as the fault says."""

    def __init__(self, draws: int) -> None:
        self.draws = draws

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        import numpy as np

        np.random.random(self.draws if ctx.rank == 1 else 0)
        if self.draws == OTHER_RATE:
            state["optimizer"].param_groups[0]["lr"] = 0.2
        return super().train_step(batch, state, ctx)


def main(rank: Rank, directory: str, kind: str, kill_at: int, draws: int, *, overlap: bool) -> None:
    torch.manual_seed(3)
    record, _ = newest_valid(directory, accept=lambda record: record.step < 8 or not overlap)
    saver, proofs = Checkpoint(directory, every_n_steps=4, asynchronous=False, overlap=overlap), Proofs()
    strategy = "sharded" if kind == "sharded" else "ddp"
    trainer = rank.trainer(saver, proofs, Kills(kill_at), strategy=strategy, max_steps=STEPS, max_epochs=-1)
    module = Plain() if kind == "plain" else ContractModule(Noisy(draws), TrainingJobSpec("witnessed", STEPS))
    rows = Rows()
    sampler = DistributedSampler(rows, rank.world_size, rank.number, seed=4)
    loader = DataLoader(rows, 2, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=None if record is None else str(record.path))
    rank.leave([proof.text for proof in proofs.found])


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    me = Rank.of_command_line()
    with me.group(f"store-{sys.argv[6]}-{sys.argv[7]}"):
        main(me, sys.argv[4], sys.argv[5], int(sys.argv[6]), int(sys.argv[7]), overlap="overlap" in sys.argv)
