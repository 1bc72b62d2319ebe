"""Networks on images: convolutions, batch norm, freezing, points that split, a scripted module."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .base import Base, images

BATCH_STATISTICS = "each rank's BatchNorm sees its own rows, as under plain DDP"


class Vision(Base, abstract=True):
    rows = staticmethod(images)

    def loss(self, batch, state):
        return cross_entropy(state["model"](batch["x"]), batch["y"])


class ConvNet(Vision):
    def model(self):
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class Block(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = norm(width)

    def forward(self, x):
        return (x + self.norm(self.conv(x))).relu()


def resnet(norm):
    return nn.Sequential(nn.Conv2d(1, 4, 3), Block(4, norm), Block(4, norm), nn.Flatten(), nn.Linear(64, 3))


class ResNet(Vision, abstract=True):
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)


class ResNetBatchNorm(ResNet):
    differs = BATCH_STATISTICS

    def model(self):
        return resnet(nn.BatchNorm2d)


class GradualUnfreezing(Vision):
    kept = ("steps",)

    def configure(self, ctx):
        state = super().configure(ctx)
        state["model"][0].requires_grad_(False)
        return {**state, "steps": 0}

    def model(self):
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def train_step(self, batch, state, ctx):
        state["model"][0].requires_grad_(state["steps"] >= 2)
        state["steps"] += 1
        return super().train_step(batch, state, ctx)


class SplatDensification(Base):
    """Splits points during training, like Gaussian splatting: new parameters with their optimizer state."""

    first = 0
    """The first of the old points that stays."""

    def configure(self, ctx):
        points = nn.Parameter(torch.randn(4, 6).to(ctx.device))
        return {"points": points, "optimizer": torch.optim.Adam([points], lr=0.05), "steps": 0}

    def loss(self, batch, state):
        return (batch["x"] @ state["points"].t()).tanh().mean(1, keepdim=True).sub(batch["y"]).square().mean()

    def after_update(self, batch, state, ctx):
        state["steps"] += 1
        if state["steps"] == 2:
            self.split(state)

    def split(self, state):
        old, optimizer = state["points"], state["optimizer"]
        moments = optimizer.state.pop(old)
        new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2] + 0.1])[self.first :])
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name] = torch.cat([moments[name], torch.zeros(2, 6, device=new.device)])[self.first :]
        optimizer.param_groups[0]["params"] = [new]
        optimizer.state[new], state["points"] = moments, new

    def state_dict(self, state):
        optimizer = state["optimizer"].state_dict()
        return {"steps": state["steps"], "points": state["points"].detach(), "optimizer": optimizer}

    def load_state_dict(self, state, payload, ctx):
        state["points"] = nn.Parameter(payload["points"].clone())
        state["optimizer"].param_groups[0]["params"] = [state["points"]]
        state["optimizer"].state.clear()
        state["optimizer"].load_state_dict(payload["optimizer"])
        state["steps"] = payload["steps"]


class Scripted(Base):
    """A module compiled by TorchScript; even two plain runs in one process round differently."""

    tolerance_alone = 1e-6

    def model(self):
        return torch.jit.script(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
