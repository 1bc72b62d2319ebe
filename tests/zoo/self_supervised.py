"""Representations without labels: contrast within the batch, queues, teachers, clusters, codebooks."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from genlight.adapter.contract.types import StepResult

from .base import Base, mlp

NEGATIVES = "negatives come from a rank's own rows"


def two_views(x):
    return x + 0.1 * x.flip(1), x - 0.1 * x.roll(1, 1)


class Clip(Base):
    """Two towers and a learned temperature, a parameter without dimensions."""

    differs = NEGATIVES

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = mlp(6, 4), mlp(6, 4)
            self.logit_scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, a, b):
            return self.logit_scale.exp() * normalize(self.image(a), dim=1) @ normalize(self.text(b), dim=1).t()

    def model(self):
        return self.Towers()

    def loss(self, batch, state):
        logits = state["model"](*two_views(batch["x"]))
        target = torch.arange(len(logits), device=logits.device)
        return (cross_entropy(logits, target) + cross_entropy(logits.t(), target)) / 2


class Byol(Base):
    """An online encoder and a momentum target; the trainer calls parts of a network separately."""

    def configure(self, ctx):
        online = nn.ModuleDict({"encoder": mlp(6, 4), "predictor": mlp(4, 4)})
        target = copy.deepcopy(online["encoder"]).requires_grad_(False)
        return {"online": online, "target": target, "optimizer": torch.optim.Adam(online.parameters(), lr=0.01)}

    def loss(self, batch, state):
        a, b = two_views(batch["x"])
        guess = state["online"]["predictor"](state["online"]["encoder"](a))
        with torch.no_grad():
            goal = state["target"](b)
        return mse_loss(normalize(guess, dim=1), normalize(goal, dim=1))

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        for t, p in zip(state["target"].parameters(), state["online"]["encoder"].parameters(), strict=True):
            t.lerp_(p, 0.1)


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
    """The trainer calls parts of one module separately."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(6, 3), mlp(3, 6)

        def forward(self, x):
            return self.decoder(self.encoder(x))

    def model(self):
        return self.Net()

    def loss(self, batch, state):
        code = state["model"].encoder(batch["x"])
        return mse_loss(state["model"].decoder(code), batch["x"]) + 0.01 * code.abs().mean()


class VectorQuantized(Base):
    """A codebook that gets gradients through the straight-through estimator."""

    def configure(self, ctx):
        encoder, decoder, codes = mlp(6, 2), mlp(2, 6), nn.Embedding(5, 2)
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters(), *codes.parameters()], lr=0.01)
        return {"encoder": encoder, "decoder": decoder, "codes": codes, "optimizer": optimizer}

    def loss(self, batch, state):
        z = state["encoder"](batch["x"])
        nearest = (z[:, None].float() - state["codes"].weight).square().sum(-1).argmin(1)
        q = state["codes"](nearest)
        commit = mse_loss(z, q.detach()) + mse_loss(q, z.detach())
        return mse_loss(state["decoder"](z + (q - z).detach()), batch["x"]) + commit


class KMeansCodebook(Base):
    """A codebook that moves to the means of its assigned rows, without autograd."""

    differs = "means over a rank's rows differ from means over all rows"
    per_rank = ("codes",)

    def configure(self, ctx):
        return {**super().configure(ctx), "codes": torch.randn(4, 6).to(ctx.device)}

    def train_step(self, batch, state, ctx):
        with torch.no_grad():
            nearest = torch.cdist(batch["x"], state["codes"]).argmin(1)
            for k in range(4):
                if (nearest == k).any():
                    state["codes"][k].lerp_(batch["x"][nearest == k].mean(0), 0.5)
        return super().train_step({"x": batch["x"] - state["codes"][nearest], "y": batch["y"]}, state, ctx)

    def state_dict(self, state):
        return {"codes": state["codes"]}

    def load_state_dict(self, state, payload, ctx):
        state["codes"].copy_(payload["codes"])
