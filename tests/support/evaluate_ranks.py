"""One rank of the evaluation's test; started once per rank: ``evaluate_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from genlight.adapter import ContractModule, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Evaluate, Hook
from support.rank import Rank

RANK = Rank.of_command_line()


class Mine:
    """Its score is the rank; on rank 1 the evaluations after steps 4 and 6 fail, and later ones have another name."""

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "step": 0}

    def prepare_batch(self, raw_batch: Any, state: Any, ctx: Any) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["step"] += 1
        loss = state["model"](torch.ones(1, 2)).sum()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def evaluate(self, state: Any, ctx: Any) -> dict[str, float]:
        if RANK.number == 1 and state["step"] in (4, 6):
            raise ValueError("no data on this rank")
        return {"val/other" if RANK.number == 1 and state["step"] > 8 else "val/rank": float(RANK.number)}

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


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
