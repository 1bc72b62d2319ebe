"""The training step that every host runs: one linear layer at batch 8, so small that the host shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.parallel import DistributedDataParallel

from genlight.adapter import StepResult

ROWS = 8
BATCH = torch.randn(ROWS, 16), torch.randn(ROWS, 1)


class Linear:
    """The trainer class: one layer, plain SGD."""

    def __init__(self, *, replicate: bool = False) -> None:
        self.replicate = replicate

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        model: torch.nn.Module = torch.nn.Linear(16, 1)
        if self.replicate:
            model = DistributedDataParallel(model)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        x, y = batch
        state["optimizer"].zero_grad()
        loss = torch.nn.functional.mse_loss(state["model"](x), y)
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Manual(pl.LightningModule):
    """The same step under stock Lightning, with an optimizer that it steps itself.

    ``manual_backward``, since after a plain ``loss.backward()`` Lightning's DDP averages no gradients.
    """

    def __init__(self, *, automatic: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.model = torch.nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=1e-4)


class Automatic(Manual):
    """The same step in Lightning's automatic optimization."""

    def __init__(self) -> None:
        super().__init__(automatic=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)


def floor(*, autocast: bool = False, replicate: bool = False) -> Callable[[], None]:
    """One step of the loop that somebody would write by hand."""
    trainer = Linear(replicate=replicate)
    state = trainer.configure(None)

    def step() -> None:
        trainer.train_step(trainer.prepare_batch(BATCH, state, None), state, None)

    def step_in_bf16() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step()

    return step_in_bf16 if autocast else step
