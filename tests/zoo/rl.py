"""Reinforcement learning on made-up transitions: replay buffers, target networks, rollouts, temperatures."""

import copy
import random
from collections import deque

import torch
from torch.nn.functional import mse_loss, smooth_l1_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, labelled, mlp

OWN_REPLAY = "each rank has its own replay buffer"


class DeepQ(Base):
    """A target network, copied every two steps."""

    kept = ("steps",)

    rows = staticmethod(labelled)

    def configure(self, ctx):
        q = mlp(6, 3)
        target = copy.deepcopy(q).requires_grad_(False)
        return {"q": q, "target": target, "optimizer": torch.optim.Adam(q.parameters(), 0.01), "steps": 0}

    def loss(self, batch, state):
        with torch.no_grad():
            best = state["target"](batch["x"].flip(1)).max(1).values
        taken = state["q"](batch["x"]).gather(1, batch["y"][:, None]).squeeze(1)
        return smooth_l1_loss(taken, batch["x"][:, 0] + 0.9 * best)

    def after_update(self, batch, state, ctx):
        state["steps"] += 1
        if state["steps"] % 2 == 0:
            state["target"].load_state_dict(state["q"].state_dict())


class DeepQWithReplay(DeepQ):
    """A replay buffer in a deque, sampled by a separate generator."""

    differs = OWN_REPLAY
    per_rank = ("replay",)

    def configure(self, ctx):
        self.draw = random.Random(ctx.rank)
        return {**super().configure(ctx), "replay": deque(maxlen=16)}

    def loss(self, batch, state):
        state["replay"].extend(zip(batch["x"], batch["y"], strict=True))
        drawn = self.draw.choices(state["replay"], k=len(batch["x"]))
        x, y = (torch.stack(part) for part in zip(*drawn, strict=True))
        return super().loss({"x": x, "y": y}, state)

    def state_dict(self, state):
        return {**super().state_dict(state), "replay": list(state["replay"]), "draw": self.draw.getstate()}

    def load_state_dict(self, state, payload, ctx):
        state["steps"] = payload["steps"]
        state["replay"].extend(payload["replay"])
        self.draw.setstate(payload["draw"])


class EvolutionStrategy(Base):
    """No autograd: updates by finite differences along directions that are equal on all ranks."""

    differs = "the ratio of losses over a rank's rows differs from the ratio over all rows"

    def setup(self, ctx):
        super().setup(ctx)
        self.noise = torch.Generator().manual_seed(1)

    def configure(self, ctx):
        return {"model": mlp().requires_grad_(False)}

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        noise = [torch.randn(p.shape, generator=self.noise).to(p.device) for p in parameters]
        losses = []
        for sign in (1, -2):
            for p, n in zip(parameters, noise, strict=True):
                p.add_(n, alpha=0.01 * sign)
            losses.append(float(mse_loss(state["model"](batch["x"]), batch["y"])))
        up, down = losses
        for p, n in zip(parameters, noise, strict=True):
            p.add_(n, alpha=0.01 - 0.01 * (up - down))
        return StepResult({"loss": up})

    def state_dict(self, state):
        return {"noise": self.noise.get_state()}

    def load_state_dict(self, state, payload, ctx):
        self.noise.set_state(payload["noise"])
