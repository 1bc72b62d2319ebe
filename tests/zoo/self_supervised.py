"""Representations without labels: queues, codes."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from genlight.adapter.contract.types import StepResult

from .base import Base, mlp


def two_views(x):
    return x + 0.1 * x.flip(1), x - 0.1 * x.roll(1, 1)


class MomentumContrast(Base):
    """MoCo: a queue of keys, filled with the rows of a rank."""

    kept = ("queue", "at")

    differs = "the queue holds a rank's own keys"
    per_rank = ("queue",)

    def configure(self, ctx):
        query = mlp(6, 4)
        key = copy.deepcopy(query).requires_grad_(False)
        queue = normalize(torch.randn(16, 4), dim=1).to(ctx.device)
        optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9)
        return {"query": query, "key": key, "queue": queue, "at": 0, "optimizer": optimizer}

    def train_step(self, batch, state, ctx):
        a, b = two_views(batch["x"])
        with torch.no_grad():
            for k, q in zip(state["key"].parameters(), state["query"].parameters(), strict=True):
                k.lerp_(q, 0.1)
            keys = normalize(state["key"](b), dim=1)
        queries = normalize(state["query"](a), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ state["queue"].t()], 1)
        loss = cross_entropy(logits / 0.2, torch.zeros(len(logits), dtype=torch.long, device=logits.device))
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        at = state["at"]
        state["queue"][at : at + len(keys)] = keys
        state["at"] = (at + len(keys)) % 16
        return StepResult({"loss": loss.detach()})


class Autoencoder(Base):
    """The trainer calls parts of one module separately, and reads a parameter without dimensions."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(6, 3), mlp(3, 6)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.decoder(self.encoder(x) * self.scale)

    def model(self):
        return self.Net()

    def loss(self, batch, state):
        code = state["model"].encoder(batch["x"]) * state["model"].scale
        return mse_loss(state["model"].decoder(code), batch["x"]) + 0.01 * code.abs().mean()
