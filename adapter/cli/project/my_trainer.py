"""A trainer class: it owns model, optimizer and step, and knows nothing of PyTorch Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from genlight.adapter import StepContext, StepResult


@dataclass
class State:
    """The state that `configure` builds. Any object will do; genlight finds the modules and optimizers in it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


class MyTrainer:
    """Learns y from a and b."""

    def setup(self, ctx: StepContext) -> None:
        """Called once, first: seeds, threads, anything that is not part of the model."""
        torch.manual_seed(0)

    def configure(self, ctx: StepContext) -> State:
        """Called once: build everything. `ctx.job.hyperparams` is the `hyperparams` of job.json."""
        width = int(ctx.job.hyperparams.get("width", 32))
        model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).to(ctx.device)
        return State(model, torch.optim.AdamW(model.parameters(), lr=ctx.job.hyperparams.get("lr", 0.01)))

    def prepare_batch(self, raw_batch: pa.RecordBatch, state: State, ctx: StepContext) -> tuple[Tensor, Tensor]:
        """Called every step: turn rows of the Parquet files into tensors."""
        a, b, y = (torch.tensor(raw_batch.column(name).to_numpy(), device=ctx.device) for name in ("a", "b", "y"))
        return torch.stack([a, b], dim=1), y[:, None]

    def train_step(self, batch: tuple[Tensor, Tensor], state: State, ctx: StepContext) -> StepResult:
        """Called every step: forward, backward, update. Return metrics as tensors; do not call `.item()` here."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(state.model(inputs), targets)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: State) -> dict[str, object]:
        """State for a checkpoint beyond models and optimizers, which are saved without your help."""
        return {}

    def load_state_dict(self, state: State, payload: dict[str, Any], ctx: StepContext) -> None:
        """Called on resume, after `configure`: take back what `state_dict` returned."""

    def evaluate(self, state: State, ctx: StepContext) -> dict[str, float]:
        """Optional. Called at the cadence `validate` of job.json; its scores become metrics."""
        with torch.no_grad():
            return {"eval/at_origin": state.model(torch.zeros(1, 2, device=ctx.device)).item()}
