"""A callback that requests a stop."""

from typing import Any

import lightning.pytorch as pl

from genlight.callbacks import Hook
from genlight.callbacks.hook.events import run_state_of


class StopsAt(Hook):
    """Requests a stop on all ranks after a step."""

    ranks = "all"
    writes = ("stop_reason",)

    def __init__(self, step: int, reason: str = "preempted") -> None:
        self.step, self.reason = step, reason

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            run_state_of(trainer).stop_reason = self.reason
