"""Trainer hooks of a project for work other than training; they get the same state as the losses."""

from __future__ import annotations

import json
from pathlib import Path

from cartpole import mean_return

from genlight.callbacks import TrainerHook, TrainerState


class EvaluationHook(TrainerHook):
    """Plays 20 episodes at a cadence of phases."""

    writes = ("eval_scores",)

    def __init__(self, every_n_epochs: int = 10) -> None:
        super().__init__()
        self.every_n_epochs = every_n_epochs

    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        if trainer_state.epoch % self.every_n_epochs == 0:
            policy = trainer_state.policy
            score = mean_return(lambda observation: policy.logits(observation).argmax(-1), episodes=20)
            trainer_state.eval_scores = {"return": score}


class MetricsHook(TrainerHook):
    """Writes a line of JSON at the end of each phase: metrics of the losses, the evaluation and the rollout."""

    reads = ("eval_scores", "loss_stats", "rollout_stats")

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        names = ("epoch", "agent_step", "update_epoch", "mb_idx", *self.reads)
        with self.path.open("a") as file:
            print(json.dumps({name: getattr(trainer_state, name) for name in names}), file=file)
