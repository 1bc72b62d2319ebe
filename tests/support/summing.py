"""Trainer classes that add up numbers and keep the total in a file as well; hyperparameters say what goes wrong."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from gen_worker.trainer import StepResult

from .trainer_class import Counts


class Summing(Counts):
    def setup(self, ctx: Any) -> None:
        self.p = dict(ctx.job.hyperparams)

    def configure(self, ctx: Any) -> Any:
        return {"total": 0, "steps": 0, "lr": 0.5}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return sum(raw["x"].to_pylist()) if hasattr(raw, "schema") else raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        if self.p.get("fails_at") == state["steps"] + 1:
            raise ZeroDivisionError("bad batch")
        time.sleep(self.p.get("sleep", 0))
        return super().train_step(batch, state, ctx)

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"total": state["total"], "steps": state["steps"]}

    def save_checkpoint(self, *, state: Any, step: int, output_dir: str, final: bool, ctx: Any) -> Any:
        Path(output_dir, "total.txt").write_text(str(state["total"]))
        return {"primary_path": "total.txt"}

    def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Any, ctx: Any) -> None:
        assert Path(checkpoint_dir, "total.txt").read_text() == str(payload["total"])


class Signalled(Summing):
    """Gets the signal that its hyperparameters name in its first step."""

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        signal.raise_signal(signal.Signals[self.p["signal"]])
        return super().train_step(batch, state, ctx)


class Overflows(Summing):
    """Its loss is infinite from step 3 on."""

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        super().train_step(batch, state, ctx)
        return StepResult(metrics={"loss": float("inf") if state["steps"] >= 3 else 1.0})


class Learns(Summing):
    """Trains a layer; its loss is infinite at step 3."""

    def configure(self, ctx: Any) -> Any:
        model = torch.nn.Linear(1, self.p.get("width", 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=self.p.get("lr", 0.01))
        return {**super().configure(ctx), "model": model, "optimizer": optimizer}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        super().train_step(batch, state, ctx)
        loss = state["model"].weight.sum() * (float("inf") if state["steps"] == 3 else 1.0)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})


class Cancels(Summing):
    """Requests a stop in its own process while it runs."""

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        os.environ["TRAINER_CANCELLED"] = "1"
        time.sleep(0.1)
        return super().train_step(batch, state, ctx)


class Misspells(Summing):
    def rollouts(self) -> None: ...

    save_checkpoint = None  # type: ignore[assignment]
