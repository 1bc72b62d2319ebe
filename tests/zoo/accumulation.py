"""Several backward calls for an update, within a step and over steps."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base


class MicroBatches(Base):
    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        parts = list(zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True))
        for x, y in parts:
            (mse_loss(state["model"](x), y) / len(parts)).backward()
        nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
        state["optimizer"].step()
        return StepResult({})


class OverTwoSteps(Base):
    kept = ("calls",)

    def configure(self, ctx):
        return {**super().configure(ctx), "calls": 0}

    def train_step(self, batch, state, ctx):
        (self.loss(batch, state) / 2).backward()
        state["calls"] += 1
        if state["calls"] % 2 == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return StepResult({})


class LooseOverTwoSteps(OverTwoSteps):
    """Parameters outside of modules; the checkpoint falls within an accumulation window."""

    def configure(self, ctx):
        w, b = torch.randn(6, 1).requires_grad_(), torch.zeros(1, requires_grad=True)
        return {"w": w, "b": b, "optimizer": torch.optim.Adam([w, b], lr=0.01), "calls": 0}

    def loss(self, batch, state):
        return mse_loss(batch["x"] @ state["w"] + state["b"], batch["y"])


class LooksInBetween(Base):
    """The gradient norm after the first backward call changes the second one."""

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        norm = sum(p.grad.square().sum() for p in state["model"].parameters()).sqrt()
        (0.1 * state["model"](batch["x"]).square().mean() / (1 + norm)).backward()
        state["optimizer"].step()
        return StepResult({"norm": norm})


class UnevenMicroBatches(Base):
    """Makes a number of backward calls that depends on the rank's rows, each with its share of the sum."""

    def train_step(self, batch, state, ctx):
        size = 1 if batch["x"][0, 0] > 0 else 4
        state["optimizer"].zero_grad()
        for x, y in zip(batch["x"].split(size), batch["y"].split(size), strict=True):
            ((state["model"](x) - y).square().sum() / len(batch["x"])).backward()
        state["optimizer"].step()
        return StepResult({})
