"""Experts and blocks that a step does not use, and a trunk that two modules share."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from .base import Base, mlp


class TopOneMixture(Base):
    """Each row goes to one expert; a rank does not call unused experts."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(mlp() for _ in range(3))

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
