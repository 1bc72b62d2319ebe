"""Networks on images: convolutions, every kind of norm, attention over patches, segmentation, detection heads."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from genlight.adapter.contract.types import StepResult

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


class FrozenBatchNorm(ResNet):
    """Fine-tuning with the statistics of the pretrained network."""

    def model(self):
        return resnet(nn.BatchNorm2d)

    def train_step(self, batch, state, ctx):
        for module in state["model"].modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return super().train_step(batch, state, ctx)


class ChannelsLast(ConvNet):
    def configure(self, ctx):
        state = super().configure(ctx)
        state["model"].to(memory_format=torch.channels_last)
        return state

    def prepare_batch(self, raw, state, ctx):
        return {"x": raw["x"].to(ctx.device, memory_format=torch.channels_last), "y": raw["y"].to(ctx.device)}


class TwoHeads(Vision):
    """Classes and boxes: two losses of one trunk, each with its own weight."""

    def configure(self, ctx):
        trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        heads = nn.ModuleDict({"classes": nn.Linear(64, 3), "boxes": nn.Linear(64, 4)})
        groups = [{"params": trunk.parameters(), "lr": 1e-3}, {"params": heads.parameters()}]
        optimizer = torch.optim.AdamW(groups, 0.01)
        return {"trunk": trunk, "heads": heads, "optimizer": optimizer}

    def loss(self, batch, state):
        features = state["trunk"](batch["x"])
        boxes = state["heads"]["boxes"](features)
        return cross_entropy(state["heads"]["classes"](features), batch["y"]) + 0.1 * boxes.abs().mean()


class UncertaintyWeights(TwoHeads):
    """Learned loss weights: loose tensors in the optimizer."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state["log_vars"] = torch.zeros(2, requires_grad=True)
        state["optimizer"].add_param_group({"params": [state["log_vars"]], "lr": 0.1})
        return state

    def loss(self, batch, state):
        features, (a, b) = state["trunk"](batch["x"]), state["log_vars"]
        classes = cross_entropy(state["heads"]["classes"](features), batch["y"])
        return classes * (-a).exp() + a + state["heads"]["boxes"](features).square().mean() * (-b).exp() + b


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


class ActivationCheckpointing(Vision):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(36, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.first(x.flatten(1))
            for block in self.blocks:
                x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=False)
            return self.head(x)

    def model(self):
        return self.Net()


class CenterLoss(Vision):
    """Class centers moved by hand; an optimizer has the network."""

    def configure(self, ctx):
        trunk, head = nn.Sequential(nn.Flatten(), nn.Linear(36, 4)), nn.Linear(4, 3)
        centers = nn.Parameter(torch.randn(3, 4).to(ctx.device))
        optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.05)
        return {"trunk": trunk, "head": head, "centers": centers, "optimizer": optimizer}

    def train_step(self, batch, state, ctx):
        features = state["trunk"](batch["x"])
        apart = (features - state["centers"][batch["y"]]).square().sum(1).mean()
        loss = cross_entropy(state["head"](features), batch["y"]) + 0.1 * apart
        state["optimizer"].zero_grad()
        state["centers"].grad = None
        loss.backward()
        state["optimizer"].step()
        with torch.no_grad():
            state["centers"] -= 0.5 * state["centers"].grad
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {"centers": state["centers"].detach()}

    def load_state_dict(self, state, payload, ctx):
        with torch.no_grad():
            state["centers"].copy_(payload["centers"])


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
