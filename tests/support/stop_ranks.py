"""One rank of the stop test; started once per rank: ``stop_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import os

import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.adapter import ContractModule
from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import StopRequests
from genlight.callbacks.stop.signals import StopSignals
from support.rank import Rank
from support.trainer_class import Trains

RANK = Rank.of_command_line()


class Told(StopRequests):
    """Request a stop only on rank 1, while it trains its third step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if RANK.number == 1 and batch_idx == 2:
            self.sources.signals.reason = "preempted"
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class Fails(StopRequests):
    """Rank 1 fails in its third step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if RANK.number == 1 and batch_idx == 2:
            raise ValueError("rank 1 broke")


def train(stop, module=None):
    trainer = RANK.trainer(stop, max_steps=50)
    try:
        trainer.fit(module or ContractModule(Trains()), None if module else BatchStream([torch.ones(1, 2)] * 50))
    except TrainingCanceled as error:
        return f"{error.reason} after {trainer.global_step}"
    return f"completed {trainer.global_step}"


def main():
    signals = StopSignals()
    signals.reason = "canceled" if RANK.number == 1 else None
    outcomes = [
        train(Told()) + " contract",
        train(Told(), BoringModel()) + " plain",
        train(StopRequests(signals=signals)) + " before",
    ]
    (RANK.folder / f"rank{RANK.number}").write_text(", ".join(outcomes))
    try:
        train(Fails())
    except Exception as error:
        (RANK.folder / f"failed{RANK.number}").write_text(str(error))
        os._exit(3)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with RANK.group():
        main()
