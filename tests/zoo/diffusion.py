"""Denoising: noise schedules, velocities, flows, classifier-free guidance, consistency."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from .base import Base, generator


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


class NoiseDrawnInTheStep(Ddpm):
    """Draws noise from the global generator for the rows of a rank."""

    differs = "each rank draws noise for its own rows"

    def loss(self, batch, state):
        return super().loss({**batch, "noise": torch.randn_like(batch["x"])}, state)
