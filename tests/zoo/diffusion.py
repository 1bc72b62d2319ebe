"""Denoising: noise schedules, velocities, flows, classifier-free guidance, consistency."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, generator, mlp


def noised(step):
    g = generator(step)
    x = torch.randn(8, 6, generator=g)
    return {"x": x, "noise": torch.randn(8, 6, generator=g), "t": torch.rand(8, 1, generator=g)}


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = nn.Linear(1, 12), nn.Linear(6, 12)
        self.out = nn.Linear(12, 6)
        self.register_buffer("scales", torch.linspace(0.5, 1.5, 6))

    def forward(self, x, t):
        return self.out((self.body(x) + self.time(t)).tanh()) * self.scales


class Diffusion(Base, abstract=True):
    rows = staticmethod(noised)

    def model(self):
        return Denoiser()


class Ddpm(Diffusion):
    def loss(self, batch, state):
        x = (1 - batch["t"]).sqrt() * batch["x"] + batch["t"].sqrt() * batch["noise"]
        return mse_loss(state["model"](x, batch["t"]), batch["noise"])


class VelocityWithEma(Ddpm):
    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "ema": copy.deepcopy(state["model"]).requires_grad_(False)}

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"], batch["t"]), batch["noise"] - batch["x"])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        with torch.no_grad():
            for a, p in zip(state["ema"].parameters(), state["model"].parameters(), strict=True):
                a.lerp_(p, 0.1)
        return StepResult({"loss": loss.detach()})


class NoiseDrawnInTheStep(Ddpm):
    """Noise from the global generator, for the rows of a rank."""

    differs = "noise is drawn for the rows of a rank"

    def loss(self, batch, state):
        return super().loss({**batch, "noise": torch.randn_like(batch["x"])}, state)


class GuidanceDropout(Diffusion):
    """The condition is left out for some rows, chosen by their time."""

    def configure(self, ctx):
        model, condition = Denoiser(), nn.Embedding(2, 6)
        optimizer = torch.optim.AdamW([*model.parameters(), *condition.parameters()], lr=0.01)
        return {"model": model, "condition": condition, "optimizer": optimizer}

    def loss(self, batch, state):
        shown = state["condition"]((batch["t"][:, 0] > 0.3).long())
        return mse_loss(state["model"](batch["noise"] + shown, batch["t"]), batch["x"])


class Consistency(Diffusion):
    """The model of one step before, a copy, is the goal."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "before": copy.deepcopy(state["model"]).requires_grad_(False)}

    def loss(self, batch, state):
        with torch.no_grad():
            goal = state["before"](batch["x"], 0.9 * batch["t"])
        return mse_loss(state["model"](batch["x"] + 0.1 * batch["noise"], batch["t"]), goal)

    def train_step(self, batch, state, ctx):
        before = copy.deepcopy(state["model"].state_dict())
        result = super().train_step(batch, state, ctx)
        state["before"].load_state_dict(before)
        return result


class LossAwareTimes(Ddpm):
    """Rows are weighed by a history of losses a time bin, which each rank keeps for its own rows."""

    differs = "the history is one of each rank's own losses"
    per_rank = ("history",)

    def configure(self, ctx):
        return {**super().configure(ctx), "history": torch.ones(4, device=ctx.device)}

    def loss(self, batch, state):
        bins = (batch["t"][:, 0] * 4).long()
        losses = (state["model"](batch["x"], batch["t"]) - batch["noise"]).square().mean(1)
        for k, value in zip(bins.tolist(), losses.tolist(), strict=True):
            state["history"][k] = 0.9 * state["history"][k] + 0.1 * value
        return (losses / state["history"][bins].sqrt()).mean()

    def state_dict(self, state):
        return {"history": state["history"]}

    def load_state_dict(self, state, payload, ctx):
        state["history"] = payload["history"].clone()


class LatentDiffusion(Diffusion):
    """A frozen encoder before it, a text tower that trains at a rate of its own."""

    def configure(self, ctx):
        encoder, tower, model = mlp(6, 6).requires_grad_(False).eval(), mlp(6, 6), Denoiser()
        groups = [{"params": model.parameters()}, {"params": tower.parameters(), "lr": 1e-3}]
        return {"encoder": encoder, "tower": tower, "model": model, "optimizer": torch.optim.AdamW(groups, lr=0.01)}

    def loss(self, batch, state):
        with torch.no_grad():
            z = state["encoder"](batch["x"])
        return mse_loss(state["model"](z + state["tower"](batch["noise"]), batch["t"]), batch["noise"])
