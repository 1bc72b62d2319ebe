"""Several backward calls for an update, within a step and over steps."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, mlp


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


class SummedByHand(OverTwoSteps):
    """The trainer sums gradients in its own list, over two steps."""

    kept = ("calls", "sums")

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "sums": [torch.zeros_like(p) for p in state["model"].parameters()]}

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        state["calls"] += 1
        parameters = list(state["model"].parameters())
        for total, p in zip(state["sums"], parameters, strict=True):
            total += p.grad
        if state["calls"] % 2 == 0:
            for total, p in zip(state["sums"], parameters, strict=True):
                p.grad.copy_(total / 2)
                total.zero_()
            state["optimizer"].step()
        return StepResult({})


class MovedAside(Base):
    """The trainer moves the gradients of microbatches out of ``.grad`` and finally stores their sum there."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True):
            state["optimizer"].zero_grad()
            (mse_loss(state["model"](x), y) / 2).backward()
            for t, p in zip(total, parameters, strict=True):
                t += p.grad
        for t, p in zip(total, parameters, strict=True):
            p.grad = t
        state["optimizer"].step()
        return StepResult({})


class RetainedGraph(Base):
    def train_step(self, batch, state, ctx):
        out = state["model"](batch["x"])
        state["optimizer"].zero_grad()
        mse_loss(out, batch["y"]).backward(retain_graph=True)
        (0.1 * out.square().mean()).backward()
        state["optimizer"].step()
        return StepResult({})


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


class ConflictingTasks(Base):
    """PCGrad: projects the gradients of two tasks on each other before it uses them."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        out = state["model"](batch["x"])
        losses = [mse_loss(out, batch["y"]), out.square().mean()]
        grads = []
        for loss in losses:
            state["optimizer"].zero_grad()
            loss.backward(retain_graph=True)
            grads.append(torch.cat([p.grad.flatten() for p in parameters]).clone())
        a, b = grads
        dot = a @ b
        both = a + b - torch.where(dot < 0, dot, 0.0) * (a / b.square().sum() + b / a.square().sum())
        for p, g in zip(parameters, both.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(g.view_as(p))
        state["optimizer"].step()
        return StepResult({})


class GradientHooks(Base):
    """Hooks on parameters scale the incoming gradients."""

    def model(self):
        model = mlp()
        for p in model.parameters():
            p.register_hook(lambda g: 0.5 * g)
        return model

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)
