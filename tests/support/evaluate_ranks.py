"""One rank of the evaluation's test; started once per rank: ``evaluate_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from genlight.adapter import ContractModule
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Evaluate, Hook
from support.rank import Rank
from support.trainer_class import Counts

RANK = Rank.of_command_line()


class Mine(Counts):
    """Its score is the rank; on rank 1 the evaluations after steps 4 and 6 fail, and later ones have another name."""

    def evaluate(self, state: Any, ctx: Any) -> dict[str, float]:
        if RANK.number == 1 and state["steps"] in (4, 6):
            raise ValueError("no data on this rank")
        return {"val/other" if RANK.number == 1 and state["steps"] > 8 else "val/rank": float(RANK.number)}


class Heard(Hook):
    ranks = "all"

    def __init__(self) -> None:
        self.scores: list[tuple[int, dict[str, float]]] = []

    def on_scores(self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Any, step: int) -> None:
        self.scores.append((step, dict(scores)))


def train(**arguments: Any) -> dict[str, Any]:
    heard, evaluate = Heard(), Evaluate(2, **arguments)
    trainer = RANK.trainer(evaluate, heard, max_steps=14)
    trainer.fit(ContractModule(Mine()), BatchStream(range(100)))
    return {
        "scores": heard.scores,
        "failures": evaluate.failures.get("on_train_batch_end"),
        "step": trainer.global_step,
    }


if __name__ == "__main__":
    with RANK.group():
        RANK.leave({"mean": train(average=True), "zero": train()})
