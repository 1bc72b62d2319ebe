"""Classes that compute with gradients and norms themselves, or use modules on some ranks only; sharded."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import mlp, trainers
from .small import Base


class WholeParameterInTheSameGroup(Base):
    """A parameter outside of modules is not sharded; torch's operations on lists of tensors must handle it too."""

    def configure(self, ctx):
        model, token = mlp(), torch.zeros(6, requires_grad=True)
        optimizer = torch.optim.AdamW([*model.parameters(), token], 0.01, foreach=True)
        return {"model": model, "token": token, "optimizer": optimizer}

    def loss(self, batch, state):
        return mse_loss(state["model"](batch["x"] + state["token"]), batch["y"])

    def change_gradients(self, state, ctx):
        nn.utils.clip_grad_norm_(state["optimizer"].param_groups[0]["params"], 0.1, foreach=True)


class HeadsByRank(Base):
    """A head for each half of the rows, so that each rank trains one; a third head is never trained."""

    def configure(self, ctx):
        heads = [mlp(5, 1) for _ in range(3)]
        body = mlp(6, 5)
        optimizer = torch.optim.AdamW([p for m in (body, *heads) for p in m.parameters()], 0.01)
        return {**self.modules(body, heads), "optimizer": optimizer}

    def modules(self, body, heads):
        return {"model": nn.ModuleDict({"body": body, "heads": nn.ModuleList(heads)})}

    def loss(self, batch, state):
        modules = state.get("model", state)
        features = modules["body"](batch["x"])
        total = 0.0
        for kind in batch["kind"].unique().tolist():
            rows = batch["kind"] == kind
            total = total + (modules["heads"][kind](features[rows]) - batch["y"][rows]).square().sum()
        return total / len(batch["x"])


class HeadsInPythonList(HeadsByRank):
    """The heads are separate modules, so that ranks gather different ones."""

    def modules(self, body, heads):
        return {"body": body, "heads": heads}


class HeadOnOneRank(HeadsInPythonList):
    """One rank uses a module that the other does not use at all."""

    def train_step(self, batch, state, ctx):
        self.rank = ctx.rank
        return super().train_step(batch, state, ctx)

    def loss(self, batch, state):
        out = state["body"](batch["x"])
        return out.square().mean() + (state["heads"][0](out).square().mean() if self.rank == 0 else 0)


class ReadsNormOnOneRank(Base):
    """A norm for the log, computed only on rank 0."""

    def change_gradients(self, state, ctx):
        if ctx.rank == 0:
            float(state["model"][0].weight.grad.norm())


class Experts(Base):
    """A mixture of experts with hard routing: a rank may use an expert that the other does not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.experts = mlp(6, 5), nn.ModuleList([mlp(5, 1) for _ in range(4)])

        def forward(self, x, kind):
            h = self.body(x)
            out = torch.zeros(len(x), 1)
            for k in kind.unique().tolist():
                out = out.index_put((torch.nonzero(kind == k)[:, 0],), self.experts[k](h[kind == k]))
            return out

    def model(self):
        return self.Model()

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, 0.01)

    def loss(self, batch, state):
        return mse_loss(state["model"](batch["x"], batch["kind"]), batch["y"])


class ClippedByHand(Base):
    """A norm summed by hand, in three ways; updates by hand."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        by_items = sum(p.grad.norm(2).item() ** 2 for p in parameters) ** 0.5
        stacked = torch.norm(torch.stack([p.grad.detach().norm(2) for p in parameters]), 2)
        foreach = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([p.grad for p in parameters])))
        assert abs(by_items - float(stacked)) < 1e-6
        assert abs(by_items - foreach.item()) < 1e-6
        if by_items > 0.1:
            for p in parameters:
                p.grad.data.mul_(0.1 / (by_items + 1e-6))
        with torch.no_grad():
            for p in parameters:
                p.sub_(0.1 * p.grad * torch.clamp(1 / (stacked + 1), max=1.0))
        return StepResult({"norm": by_items})


class SignsAndMasks(Base):
    """Updates by the sign of gradients, masked by a global threshold of their size."""

    @torch.no_grad()
    def change_gradients(self, state, ctx):
        mean = sum(p.grad.abs().sum() for p in state["model"].parameters()) / 97
        for p in state["model"].parameters():
            p.grad.copy_(torch.where(p.grad.abs() > mean, p.grad.sign(), torch.zeros_like(p.grad)))


class ResNet(Base):
    """Convolutions, BatchNorm, a shortcut, pooling; called in eval mode after the update."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.conv, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            x = self.norm(self.stem(x)).relu()
            x = (x + self.norm2(self.conv(x))).relu()
            return self.head(x.mean((2, 3)))

    def model(self):
        return self.Model()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-4)

    def loss(self, batch, state):
        x = torch.cat([batch["x"], batch["x"].flip(1), batch["x"].roll(2, 1)], 1)[:, :16].reshape(-1, 1, 4, 4)
        return mse_loss(state["model"](x), batch["y"])

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        state["model"].eval()
        self.loss(batch, state)
        state["model"].train()


class SkipsOneLossOfItsOwn(Base):
    """A rank whose loss is nan leaves the step before it calls backward."""

    def train_step(self, batch, state, ctx):
        if bool((batch["kind"] == 1).all()):
            self.loss(batch, state)
            return StepResult({})
        return super().train_step(batch, state, ctx)


ZOO = trainers(globals())
OTHER_HEADS = r"rank 0 is about to call state\[\"model\"\]\.heads\.0, rank 1 to call state\[\"model\"\]\.heads\.1"
REFUSED = {
    "HeadsByRank": OTHER_HEADS,
    "Experts": r"rank 0 is about to leave gradients of 8 sharded .* ranks used different parameters; set `unused_param",
    "SkipsOneLossOfItsOwn": (
        r"rank 0 is about to call backward, rank 1 to end the step\. Rank 0 is at "
        r".*\.py:\d+, in train_step\. `train_step` must update on all ranks or on none.*on_nonfinite to skip"
    ),
    "HeadsInPythonList": r'rank 0 is about to call state\["heads"\]\[0\], rank 1 to call state\["heads"\]\[1\]',
    "HeadOnOneRank": r'rank 0 is about to call state\["heads"\]\[0\], rank 1 to call backward',
    "ReadsNormOnOneRank": r"rank 0 is about to compute `__float__` of a sharded tensor .* rank 1 to update by Adam",
}
