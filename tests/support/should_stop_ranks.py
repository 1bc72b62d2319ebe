"""One rank whose training only rank zero ends: ``should_stop_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from genlight.adapter import ContractModule, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import EarlyStopping, LogMetrics
from genlight.callbacks.compat import Callback, CallbackList
from support.rank import Rank

RANK = Rank.of_command_line()


class Improves:
    """Its loss falls for longer on rank 1, but rank 1 does not decide."""

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {"step": 0}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["step"] += 1
        return StepResult(metrics={"loss": 100.0 - min(state["step"], 5 if RANK.number == 0 else 50)})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


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
