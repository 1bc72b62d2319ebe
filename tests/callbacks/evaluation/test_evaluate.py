"""A trainer's own evaluation: the same scores and failures on all ranks, and an end to failing."""

from __future__ import annotations

import json
import logging

import torch

from genlight.callbacks import Evaluate
from support.rank_processes import run_ranks
from support.trainer_class import Counts


class Fails(Counts):
    """Its evaluation changes the mode of its model and fails, but for those after `works_at`."""

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


def test_ranks_report_the_same_scores_and_fail_together(tmp_path) -> None:
    run_ranks("evaluate_ranks.py", tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    # Rank 1 fails after 4 and 6; from 10 on its scores have another name and cannot be averaged: 10, 12, 14.
    assert ranks[0]["mean"] == {"scores": [[2, {"val/rank": 0.5}], [8, {"val/rank": 0.5}]], "failures": 5, "step": 14}
    zero = [[step, {"val/rank": 0.0}] for step in (2, 8, 10, 12, 14)]
    assert ranks[0]["zero"] == {"scores": zero, "failures": 2, "step": 14}
