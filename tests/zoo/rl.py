"""Reinforcement learning on made-up transitions: replay buffers, target networks, rollouts, temperatures."""

import copy
import random
from collections import deque

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn.functional import mse_loss, smooth_l1_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, labelled, mlp

OWN_REPLAY = "each rank has its own replay buffer"


def soft_update(target, source, tau=0.1):
    with torch.no_grad():
        for t, s in zip(target.parameters(), source.parameters(), strict=True):
            t.mul_(1 - tau).add_(s, alpha=tau)


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


class SoftActorCritic(Base):
    """Actor, two critics with targets, and a learned temperature outside of modules."""

    differs = "each rank draws actions for its own rows"

    def configure(self, ctx):
        actor, critics = mlp(6, 2), nn.ModuleList(mlp(7, 1) for _ in range(2))
        log_alpha = torch.zeros(1, requires_grad=True)
        optimizers = {
            "actor": torch.optim.Adam(actor.parameters(), 0.01),
            "critics": torch.optim.Adam(critics.parameters(), 0.01),
            "alpha": torch.optim.Adam([log_alpha], 0.05),
        }
        targets = copy.deepcopy(critics).requires_grad_(False)
        return {"actor": actor, "critics": critics, "targets": targets, "log_alpha": log_alpha, "opts": optimizers}

    def act(self, state, x):
        mean, log_std = state["actor"](x).chunk(2, 1)
        normal = Normal(mean.float(), log_std.float().clamp(-3, 1).exp())
        action = normal.rsample()
        return action, normal.log_prob(action)

    def train_step(self, batch, state, ctx):
        x, opts = batch["x"], state["opts"]
        with torch.no_grad():
            action, log_p = self.act(state, x.flip(1))
            values = torch.stack([c(torch.cat([x.flip(1), action], 1)) for c in state["targets"]])
            goal = batch["y"] + 0.9 * (values.min(0).values - state["log_alpha"].exp() * log_p)
        taken = torch.cat([x, x[:, :1]], 1)
        loss = sum(mse_loss(c(taken).float(), goal.float()) for c in state["critics"])
        opts["critics"].zero_grad()
        loss.backward()
        opts["critics"].step()
        action, log_p = self.act(state, x)
        value = torch.stack([c(torch.cat([x, action], 1)) for c in state["critics"]]).min(0).values
        opts["actor"].zero_grad()
        (state["log_alpha"].exp().detach() * log_p - value).mean().backward()
        opts["actor"].step()
        opts["alpha"].zero_grad()
        (-state["log_alpha"].exp() * (log_p.detach() - 1.0)).mean().backward()
        opts["alpha"].step()
        soft_update(state["targets"], state["critics"])
        return StepResult({"loss": loss.detach()})


class ClippedPolicy(Base):
    """PPO's surrogate over two epochs of the batch, with entropy and value losses."""

    rows = staticmethod(labelled)

    def configure(self, ctx):
        policy, value = mlp(6, 3), mlp(6, 1)
        optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=0.01)
        return {"policy": policy, "value": value, "optimizer": optimizer}

    def train_step(self, batch, state, ctx):
        with torch.no_grad():
            old = state["policy"](batch["x"]).log_softmax(1).gather(1, batch["y"][:, None])
            advantage = batch["x"].sum(1, keepdim=True) - state["value"](batch["x"])
        for _ in range(2):
            logits = state["policy"](batch["x"]).log_softmax(1)
            ratio = (logits.gather(1, batch["y"][:, None]) - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(logits.exp() * logits).sum(1).mean()
            value_loss = mse_loss(state["value"](batch["x"]), batch["x"].sum(1, keepdim=True))
            state["optimizer"].zero_grad()
            (0.5 * value_loss - gain - 0.01 * entropy).backward()
            nn.utils.clip_grad_norm_([p for g in state["optimizer"].param_groups for p in g["params"]], 0.5)
            state["optimizer"].step()
        return StepResult({"gain": gain.detach()})


class NormalizedObservations(Base):
    """Running moments of each rank's own observations, in buffers of an untrained module."""

    differs = "observations are normalized by each rank's own moments"
    per_rank = ("moments",)
    rank_local = ("moments",)

    class Moments(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += len(x)
            self.mean += (x - self.mean).sum(0) / self.count
            return x - self.mean

    def configure(self, ctx):
        return {**super().configure(ctx), "moments": self.Moments()}

    def loss(self, batch, state):
        return mse_loss(state["model"](state["moments"](batch["x"])), batch["y"])


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
