"""Learning to learn: inner loops, functional calls, gradients written by hand."""

import copy

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, mlp


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


class Maml(Base):
    """Second-order gradients, by functional calls."""

    differs = "each rank makes the inner step with its own rows"

    def loss(self, batch, state):
        model = state["model"]
        weights = dict(model.named_parameters())
        inner = mse_loss(functional_call(model, weights, (batch["x"][:2],)), batch["y"][:2])
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {n: w - 0.05 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        return mse_loss(functional_call(model, adapted, (batch["x"][2:],)), batch["y"][2:])


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


class PerSampleGradients(Base):
    """Clips gradients row by row, like private training, and averages them."""

    def train_step(self, batch, state, ctx):
        model = state["model"]

        def loss(weights, x, y):
            return mse_loss(functional_call(model, weights, (x[None],)), y[None])

        weights = {name: p.detach() for name, p in model.named_parameters()}
        grads = vmap(grad(loss), in_dims=(None, 0, 0))(weights, batch["x"], batch["y"])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (0.1 / (norms + 1e-6)).clamp_max(1.0)
        for name, p in model.named_parameters():
            p.grad = (grads[name] * scale.view(-1, *[1] * p.dim())).mean(0)
        state["optimizer"].step()
        return StepResult({})

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5)


class WritesGradients(Base):
    """Writes the result of torch.autograd.grad to .grad."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        for p, g in zip(parameters, torch.autograd.grad(self.loss(batch, state), parameters), strict=True):
            p.grad = g
        state["optimizer"].step()
        return StepResult({})


class LearnedLearningRate(Base):
    """Hypergradients: changes a log rate outside of modules by the product of two gradients."""

    kept = ("log_lr", "last")

    def configure(self, ctx):
        model = mlp().to(ctx.device)
        log_lr = torch.tensor(-3.0, device=ctx.device)
        return {"model": model, "log_lr": log_lr, "last": [torch.zeros_like(p) for p in model.parameters()]}

    def train_step(self, batch, state, ctx):
        state["model"].zero_grad()
        loss = self.loss(batch, state)
        loss.backward()
        with torch.no_grad():
            parameters = list(state["model"].parameters())
            dot = sum((p.grad * last).sum() for p, last in zip(parameters, state["last"], strict=True))
            state["log_lr"] += 0.1 * dot
            for p, last in zip(parameters, state["last"], strict=True):
                last.copy_(p.grad)
                p -= state["log_lr"].exp() * p.grad
        return StepResult({"loss": loss.detach(), "lr": state["log_lr"].exp()})


class AdversarialTraining(Base):
    """PGD on the input within the step."""

    def loss(self, batch, state):
        delta = torch.zeros_like(batch["x"])
        for _ in range(2):
            delta.requires_grad_()
            attacked = mse_loss(state["model"](batch["x"] + delta), batch["y"])
            (g,) = torch.autograd.grad(attacked, delta)
            delta = (delta + 0.05 * g / (g.norm(dim=1, keepdim=True) + 1e-6)).detach()
        return mse_loss(state["model"](batch["x"] + delta), batch["y"])


class LatentPerBatch(Base):
    """Fits a new latent in every step, by an optimizer that exists only there."""

    def train_step(self, batch, state, ctx):
        latent = torch.zeros_like(batch["y"], requires_grad=True)
        inner = torch.optim.SGD([latent], lr=1.0)
        ((latent - batch["y"]).square().sum() / 4).backward()
        inner.step()
        return super().train_step({**batch, "y": latent.detach()}, state, ctx)
