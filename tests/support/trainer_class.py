"""Trainer classes of the contract with all six hooks; a test overrides only the hooks that it is about.

The code of a test's trainer can also be a text that a process imports: it then begins with
``from support.trainer_class import Counts``, ``Stateless`` or ``Trains``, if ``tests`` is on the path of that process
(`environ_with_tests` of `support.forked`).
"""

from typing import Any

import torch
from torch import nn

from genlight.adapter.contract.types import StepContext, StepResult


class Counts:
    """Adds up its batches without a model: the state is a dict with `steps` and `total`."""

    def setup(self, ctx: StepContext) -> None:
        pass

    def configure(self, ctx: StepContext) -> Any:
        return {"steps": 0, "total": 0.0}

    def prepare_batch(self, raw: Any, state: Any, ctx: StepContext) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        state["steps"] += 1
        state["total"] += float(batch)
        return StepResult(metrics={"loss": 1.0 / state["steps"], "total": state["total"]})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


class Stateless(Counts):
    """Saves nothing: the state is an empty dict, and so is the payload, also of a subclass that builds a state."""

    def configure(self, ctx: StepContext) -> Any:
        return {}

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        return StepResult(metrics={"loss": 0.5})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext) -> None:
        pass


class Trains(Counts):
    """Trains a small network on batches of shape (rows, 2): the state is a dict with `model` and `optimizer`."""

    def setup(self, ctx: StepContext) -> None:
        torch.manual_seed(0)

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def configure(self, ctx: StepContext) -> Any:
        model = self.model().to(ctx.device)
        return {"model": model, "optimizer": self.optimizer(model.parameters())}

    def prepare_batch(self, raw: Any, state: Any, ctx: StepContext) -> Any:
        return raw.to(ctx.device)

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return state["model"](batch).square().mean()

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        state["optimizer"].zero_grad()
        loss = self.loss(batch, state)
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])


class TrainsAndCounts(Trains):
    """Saves only the number of its steps, `step` in the state; genlight saves model and optimizer by itself."""

    def configure(self, ctx: StepContext) -> Any:
        return {**super().configure(ctx), "step": 0}

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        state["step"] += 1
        return super().train_step(batch, state, ctx)

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"step": state["step"]}

    def load_state_dict(self, state: Any, payload: dict[str, Any], ctx: StepContext) -> None:
        state["step"] = payload["step"]
