"""A trainer's own evaluation: the same scores and failures on all ranks, and an end to failing."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from genlight.adapter import ContractModule
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Evaluate, Hook
from support.rank import Rank
from support.rank_processes import on_ranks
from support.trainer_class import Counts


class Fails(Counts):
    def __init__(self, works_at: tuple[int, ...] = ()) -> None:
        self.works_at, self.modes = works_at, []

    def configure(self, ctx):
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
        return {**super().configure(ctx), "model": model}

    def train_step(self, batch, state, ctx):
        self.modes.append([part.training for part in state["model"].modules()])
        return super().train_step(batch, state, ctx)

    def evaluate(self, state, ctx):
        state["model"].eval()
        if state["steps"] not in self.works_at:
            raise ValueError(f"broken at {state['steps']}")
        state["model"].train()
        return {"val/loss": 1.0}


def test_a_failure_is_tolerated_and_leaves_no_part_in_the_wrong_mode(fit, caplog) -> None:
    evaluate, plugin = Evaluate(2), Fails(works_at=(6,))
    with caplog.at_level(logging.WARNING):
        fit(plugin, [evaluate], steps=20)
    assert evaluate.failures == {"on_train_batch_end": 9}
    assert "Evaluate failed in on_train_batch_end; training continues" in caplog.text
    assert plugin.modes == [[True, True, True]] * 20


class Scores(Counts):
    """Its score is the rank; on rank 1 the evaluations after steps 4 and 6 fail, and later ones have another name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def evaluate(self, state: Any, ctx: Any) -> dict[str, float]:
        if self.rank == 1 and state["steps"] in (4, 6):
            raise ValueError("no data on this rank")
        return {"val/other" if self.rank == 1 and state["steps"] > 8 else "val/rank": float(self.rank)}


class Heard(Hook):
    ranks = "all"

    def __init__(self) -> None:
        self.scores: list[tuple[int, dict[str, float]]] = []

    def on_scores(self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Any, step: int) -> None:
        self.scores.append((step, dict(scores)))


def train(rank: Rank, **arguments: Any) -> dict[str, Any]:
    heard, evaluate = Heard(), Evaluate(2, **arguments)
    trainer = rank.trainer(evaluate, heard, max_steps=14)
    trainer.fit(ContractModule(Scores(rank.number)), BatchStream(range(100)))
    return {
        "scores": heard.scores,
        "failures": evaluate.failures.get("on_train_batch_end"),
        "step": trainer.global_step,
    }


def evaluate_on_rank(rank: Rank) -> dict[str, Any]:
    with rank.group():
        return {"mean": train(rank, average=True), "zero": train(rank)}


def test_ranks_report_the_same_scores_and_fail_together(tmp_path) -> None:
    ranks, _ = on_ranks(evaluate_on_rank, tmp_path)
    assert ranks[0] == ranks[1]
    # Rank 1 fails after 4 and 6; from 10 on its scores have another name and cannot be averaged: 10, 12, 14.
    assert ranks[0]["mean"] == {"scores": [(2, {"val/rank": 0.5}), (8, {"val/rank": 0.5})], "failures": 5, "step": 14}
    zero = [(step, {"val/rank": 0.0}) for step in (2, 8, 10, 12, 14)]
    assert ranks[0]["zero"] == {"scores": zero, "failures": 2, "step": 14}
