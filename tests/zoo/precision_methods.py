"""Trainer classes that a scaled loss, autocast or a cast of modules gets in the way of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult
from zoo.small import Base, mlp


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as most copies of it are written; `step` evaluates a closure in between."""

    def __init__(self, parameters: Any, base_optimizer: Any, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"rho": rho, **settings})
        self.base_optimizer = base_optimizer(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.norm(torch.stack([p.grad.norm(2) for g in self.param_groups for p in g["params"]]), 2)
        for group in self.param_groups:
            for p in group["params"]:
                e = p.grad * (group["rho"] / (norm + 1e-12))
                p.add_(e)
                self.state[p]["e"] = e
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["e"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class SamWithClosure(Base):
    def configure(self, ctx):
        model = mlp()
        return {"model": model, "optimizer": Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)}

    def train_step(self, batch, state, ctx):
        model, optimizer = state["model"], state["optimizer"]

        def closure() -> Any:
            loss = mse_loss(model(batch["x"]).float(), batch["y"])
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return StepResult({"loss": loss.detach()})


class SamInTwoSteps(SamWithClosure):
    """The same by two calls of methods of the optimizer's own."""

    def train_step(self, batch, state, ctx):
        model, optimizer = state["model"], state["optimizer"]
        mse_loss(model(batch["x"]).float(), batch["y"]).backward()
        optimizer.first_step(zero_grad=True)
        mse_loss(model(batch["x"]).float(), batch["y"]).backward()
        optimizer.second_step(zero_grad=True)
        return StepResult({})


class FirstOrderMaml(Base):
    """An inner loop on a copy with an optimizer of its own; its gradients are those of the model."""

    def train_step(self, batch, state, ctx):
        model, optimizer = state["model"], state["optimizer"]
        optimizer.zero_grad()
        for task in range(2):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.1)
            rows = slice(task, None, 2)
            inner.zero_grad()
            mse_loss(learner(batch["x"][rows]).float(), batch["y"][rows]).backward()
            inner.step()
            inner.zero_grad()
            mse_loss(learner(batch["x"][rows]).float(), batch["y"][rows]).backward()
            for p, q in zip(model.parameters(), learner.parameters(), strict=True):
                p.grad = q.grad.clone() if p.grad is None else p.grad + q.grad
        optimizer.step()
        return StepResult({})


class CompiledStep(Base):
    """Forward, backward and clearing in one compiled function."""

    def configure(self, ctx):
        state = super().configure(ctx)
        model = state["model"]

        def forward_and_backward(x: Any, y: Any) -> Any:
            loss = mse_loss(model(x).float(), y)
            loss.backward()
            return loss.detach()

        self.compiled = torch.compile(forward_and_backward, backend="aot_eager")
        return state

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        loss = self.compiled(batch["x"], batch["y"])
        state["optimizer"].step()
        return StepResult({"loss": loss})


class DoubleModel(Base):
    """A model in float64, as physics asks for."""

    def configure(self, ctx):
        model = mlp().double()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01)}

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"].double()), batch["y"].double())
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class PerSampleGradients(Base):
    """Gradients of each row, clipped and averaged by hand, from activations and gradients of outputs (as in DP-SGD)."""

    def train_step(self, batch, state, ctx):
        model, optimizer = state["model"], state["optimizer"]
        first, act, last = model
        x = batch["x"]
        pre = first(x)
        hidden = act(pre)
        out = last(hidden)
        loss = (out - batch["y"]).square().sum()
        g_pre, g_out = torch.autograd.grad(loss, (pre, out))
        with torch.no_grad():
            samples = [torch.einsum("no,ni->noi", g_pre, x), g_pre]
            samples += [torch.einsum("no,ni->noi", g_out, hidden), g_out]
            norms = sum(s.flatten(1).square().sum(1) for s in samples).sqrt()
            weights = (1.0 / (norms + 1e-6)).clamp(max=1.0) / len(x)
            for p, s in zip(model.parameters(), samples, strict=True):
                p.grad = torch.einsum("n,n...->...", weights, s)
        optimizer.step()
        return StepResult({"loss": loss.detach()})


class QuantisationAware(Base):
    """Fake quantisation of weights and activations by torch's own operators."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 1)
            self.observe = torch.ao.quantization.FakeQuantize()

        def forward(self, x):
            w = torch.fake_quantize_per_tensor_affine(self.first.weight, 0.01, 0, -128, 127)
            return self.last(self.observe(nn.functional.linear(x, w, self.first.bias).tanh()))

    def configure(self, ctx):
        model = self.Quantised()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01)}

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]).float(), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


CLASSES = (
    SamWithClosure,
    SamInTwoSteps,
    FirstOrderMaml,
    CompiledStep,
    DoubleModel,
    PerSampleGradients,
    QuantisationAware,
)
ZOO = {cls.__name__: cls for cls in CLASSES}
