"""Trainer classes and loaders whose state is easily lost at a resume, for the tests of ``genlight check``."""

import itertools
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from zoo.base import Trainer

from genlight.adapter.contract.types import StepResult


class Augmented(Dataset):
    """Rows that a worker changes by random numbers of every kind."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.full((2,), index / 48) + random.random() + torch.tensor(np.random.rand(2)).float() + torch.rand(2)
        return {"x": x, "y": x.sum(0, keepdim=True)}


def drawing():
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2)


def persistent():
    return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)


class Endless:
    """A stream that goes on where this process, and no other, has left it."""

    count = itertools.count()

    def __iter__(self):
        while True:
            x = torch.full((4, 2), float(next(self.count) % 14))
            yield {"x": x, "y": x.sum(1, keepdim=True)}


def endless():
    Endless.count = itertools.count()
    return Endless()


class Plain(Trainer):
    """A network, dropout included, and Adam."""

    kept = ("count",)

    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))

    def configure(self, ctx):
        return {**super().configure(ctx), "count": 0}

    def prepare_batch(self, raw, state, ctx):
        return tuple(torch.as_tensor(raw[name], dtype=torch.float32) for name in ("x", "y"))

    def loss(self, batch, state):
        state["count"] += 1
        return (state["model"](batch[0]).float() - batch[1]).square().mean()


class Nadam(Plain):
    def optimizer(self, parameters):
        return torch.optim.NAdam(parameters, lr=0.01)


class HalfMoments(torch.optim.Optimizer):
    """Momentum in bf16, and a number for each row."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["row"] = torch.zeros(len(p))
            state["momentum"].mul_(0.9).add_(p.grad)
            state["row"] += p.grad.square().flatten(1).mean(1) if p.dim() > 1 else p.grad.square()
            scale = (state["row"].sqrt() + 0.1).view(-1, *[1] * (p.dim() - 1))
            p.sub_(0.05 * state["momentum"].float() / scale)


class OddState(Plain):
    def optimizer(self, parameters):
        return HalfMoments(parameters)


class Window(Plain):
    """Four steps an update; one rank leaves a layer out in the first of them."""

    def train_step(self, batch, state, ctx):
        depth = slice(2, 4) if state["count"] % 4 == 0 and ctx.rank == 1 else slice(0, 4)
        rows = batch[0] if depth.start == 0 else batch[0].repeat(1, 4)
        loss = (state["model"][depth](rows) - batch[1]).square().mean()
        loss.backward()
        state["count"] += 1
        if state["count"] % 4 == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return StepResult({"loss": loss.detach()})


class SumsAside(Plain):
    """Adds up the gradients of two tasks outside of ``.grad``; the first overflows at the first scale of 16-mixed."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for factor in (3.0, 0.001):
            state["optimizer"].zero_grad()
            loss = factor * self.loss(batch, state)
            loss.backward()
            for t, p in zip(total, parameters, strict=True):
                t += p.grad
        for t, p in zip(total, parameters, strict=True):
            p.grad = t
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})
