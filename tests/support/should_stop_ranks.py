"""One rank whose training only rank zero ends: ``should_stop_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from genlight.adapter import ContractModule, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import EarlyStopping, LogMetrics
from genlight.callbacks.compat import Callback, CallbackList
from support.rank import Rank
from support.trainer_class import Counts

RANK = Rank.of_command_line()


class Improves(Counts):
    """Its loss falls for longer on rank 1, but rank 1 does not decide."""

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        super().train_step(batch, state, ctx)
        return StepResult(metrics={"loss": 100.0 - min(state["steps"], 5 if RANK.number == 0 else 50)})


class Stops(Callback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.should_stop = trainer.global_step >= 7


def last_step(name: str, *callbacks: pl.Callback) -> int:
    trainer = RANK.trainer(*callbacks, max_steps=60, max_epochs=1)
    with RANK.group(f"store {name}"):
        trainer.fit(ContractModule(Improves()), BatchStream(range(60)))
    return trainer.global_step


if __name__ == "__main__":
    RANK.leave(
        {
            "six hooks": last_step("six hooks", CallbackList([Stops()], defaults=False)),
            "early stopping": last_step("early stopping", LogMetrics(1), EarlyStopping("loss", 18)),
        }
    )
