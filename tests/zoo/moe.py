"""Mixtures of experts: dense and sparse routing, experts that a rank does not use, heads by kind of row."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from .base import Base, generator, mlp


def kinds(step):
    x = torch.randn(8, 6, generator=generator(step))
    return {"x": x, "y": x.sum(1, keepdim=True).tanh(), "kind": (torch.arange(8) >= 4).long()}


class DenseMixture(Base):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(mlp() for _ in range(3))

        def forward(self, x):
            return (torch.cat([e(x) for e in self.experts], 1) * self.gate(x).softmax(1)).sum(1, keepdim=True)

    def model(self):
        return self.Net()


class TopOneMixture(Base):
    """Each row goes to one expert; a rank does not call unused experts."""

    class Net(DenseMixture.Net):
        def forward(self, x):
            weights = self.gate(x).softmax(1)
            best = weights.argmax(1)
            out = torch.zeros(len(x), 1, device=x.device)
            for k, expert in enumerate(self.experts):
                rows = best == k
                if rows.any():
                    out = out.index_put((rows.nonzero()[:, 0],), (expert(x[rows]) * weights[rows, k : k + 1]).float())
            return out

    def model(self):
        return self.Net()


class BalancedRouter(TopOneMixture):
    """A bias for each expert depends on how often a rank used it, without autograd."""

    differs = "each rank balances experts by its own rows"
    per_rank = ("bias",)

    def configure(self, ctx):
        return {**super().configure(ctx), "bias": torch.zeros(3, device=ctx.device)}

    def loss(self, batch, state):
        gates = state["model"].gate(batch["x"]).detach() + state["bias"]
        used = torch.bincount(gates.argmax(1), minlength=3) / len(gates)
        state["bias"] -= 0.01 * (used - 1 / 3).sign()
        return super().loss(batch, state) + 0.0 * state["model"].gate.weight.sum()

    def state_dict(self, state):
        return {"bias": state["bias"]}

    def load_state_dict(self, state, payload, ctx):
        state["bias"].copy_(payload["bias"])


class StochasticDepth(Base):
    """Skips blocks at random, the same on all ranks."""

    def setup(self, ctx):
        super().setup(ctx)
        self.coin = torch.Generator().manual_seed(2)

    def configure(self, ctx):
        blocks, head = nn.ModuleList(mlp(6, 6) for _ in range(3)), nn.Linear(6, 1)
        parameters = [*blocks.parameters(), *head.parameters()]
        return {"blocks": blocks, "head": head, "optimizer": torch.optim.SGD(parameters, lr=0.05)}

    def loss(self, batch, state):
        x = batch["x"]
        for block in state["blocks"]:
            if torch.rand((), generator=self.coin) < 0.7:
                x = x + block(x)
        return mse_loss(state["head"](x), batch["y"])

    def state_dict(self, state):
        return {"coin": self.coin.get_state()}

    def load_state_dict(self, state, payload, ctx):
        self.coin.set_state(payload["coin"])


class SharedSubmodule(Base):
    """Two modules of the state share a trunk."""

    def configure(self, ctx):
        trunk = mlp(6, 4)
        a, b = nn.Sequential(trunk, nn.Linear(4, 1)), nn.Sequential(trunk, nn.Linear(4, 1))
        parameters = {id(p): p for m in (a, b) for p in m.parameters()}.values()
        return {"a": a, "b": b, "optimizer": torch.optim.Adam(list(parameters), lr=0.01)}

    def loss(self, batch, state):
        return mse_loss(state["a"](batch["x"]), batch["y"]) + mse_loss(state["b"](batch["x"]), -batch["y"])
