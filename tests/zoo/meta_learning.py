"""Learning to learn: inner loops, functional calls, gradients written by hand."""

import copy

import torch
from torch.func import functional_call, grad
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base


class FirstOrderMaml(Base):
    """Writes the gradient of an adapted clone to the model."""

    differs = "each rank makes the inner step with its own rows"

    def train_step(self, batch, state, ctx):
        model = state["model"]
        clone = copy.deepcopy(model)
        inner = torch.optim.SGD(clone.parameters(), lr=0.05)
        mse_loss(clone(batch["x"][:2]), batch["y"][:2]).backward()
        inner.step()
        inner.zero_grad()
        loss = mse_loss(clone(batch["x"][2:]), batch["y"][2:])
        loss.backward()
        for p, c in zip(model.parameters(), clone.parameters(), strict=True):
            p.grad = c.grad
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class FunctionalGradients(Base):
    """Writes the result of torch.func.grad to .grad."""

    def train_step(self, batch, state, ctx):
        model = state["model"]

        def loss(weights):
            return mse_loss(functional_call(model, weights, (batch["x"],)), batch["y"])

        grads = grad(loss)({name: p.detach() for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            p.grad = grads[name]
        state["optimizer"].step()
        return StepResult({})


class WritesGradients(Base):
    """Writes the result of torch.autograd.grad to .grad."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        for p, g in zip(parameters, torch.autograd.grad(self.loss(batch, state), parameters), strict=True):
            p.grad = g
        state["optimizer"].step()
        return StepResult({})
