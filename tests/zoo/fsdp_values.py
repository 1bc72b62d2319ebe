"""Trainer classes that compute with gradients and norms themselves, or use modules on some ranks only."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult
from zoo.small import Base, mlp


class WholeParameterInTheSameGroup(Base):
    """A parameter outside of modules is not sharded; torch's operations on lists of tensors must handle it too."""

    def configure(self, ctx):
        model, token = mlp(), torch.zeros(6, requires_grad=True)
        optimizer = torch.optim.AdamW([*model.parameters(), token], 0.01, foreach=True)
        return {"model": model, "token": token, "optimizer": optimizer}

    def train_step(self, batch, state, ctx):
        parameters = state["optimizer"].param_groups[0]["params"]
        state["optimizer"].zero_grad()
        loss = mse_loss(state["model"](batch["x"] + state["token"]), batch["y"])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True)
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class HeadsByRank(Base):
    """A head for each half of the rows, so that each rank trains one; a third head is never trained."""

    together = True

    def configure(self, ctx):
        heads = [mlp(5, 1) for _ in range(3)]
        body = mlp(6, 5)
        if self.together:
            model = nn.Module()
            model.body, model.heads = body, nn.ModuleList(heads)
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01)}
        parameters = [p for m in (body, *heads) for p in m.parameters()]
        return {"body": body, "heads": heads, "optimizer": torch.optim.AdamW(parameters, 0.01)}

    def train_step(self, batch, state, ctx):
        body, heads = (state["model"].body, state["model"].heads) if self.together else (state["body"], state["heads"])
        features = body(batch["x"])
        total = 0.0
        for kind in batch["kind"].unique().tolist():
            rows = batch["kind"] == kind
            total = total + (heads[kind](features[rows]) - batch["y"][rows]).square().sum()
        loss = total / len(batch["x"])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class HeadsInPythonList(HeadsByRank):
    """The heads are separate modules, so that ranks gather different ones."""

    together = False


class HeadOnOneRank(HeadsInPythonList):
    """One rank uses a module that the other does not use at all."""

    def train_step(self, batch, state, ctx):
        out = state["body"](batch["x"])
        loss = out.square().mean() + (state["heads"][0](out).square().mean() if ctx.rank == 0 else 0)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({})


class ReadsNormOnOneRank(Base):
    """A norm for the log, computed only on rank 0."""

    def train_step(self, batch, state, ctx):
        mse_loss(state["model"](batch["x"]), batch["y"]).backward()
        if ctx.rank == 0:
            float(state["model"][0].weight.grad.norm())
        state["optimizer"].step()
        return StepResult({})


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

    def configure(self, ctx):
        model = self.Model()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01)}

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"], batch["kind"]), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class ClippedByHand(Base):
    """A norm summed by hand, in three ways."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
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

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        with torch.no_grad():
            mean = sum(p.grad.abs().sum() for p in state["model"].parameters()) / 97
            for p in state["model"].parameters():
                p.grad.copy_(torch.where(p.grad.abs() > mean, p.grad.sign(), torch.zeros_like(p.grad)))
        state["optimizer"].step()
        return StepResult({"mean": mean})


class ResNet(Base):
    """Convolutions, BatchNorm, a shortcut, pooling."""

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

    def configure(self, ctx):
        model = self.Model()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)}

    def train_step(self, batch, state, ctx):
        x = torch.cat([batch["x"], batch["x"].flip(1), batch["x"].roll(2, 1)], 1)[:, :16].reshape(-1, 1, 4, 4)
        loss = mse_loss(state["model"](x), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["model"].eval()
        with torch.no_grad():
            state["model"](x)
        state["model"].train()
        return StepResult({"loss": loss.detach()})


class SkipsOneLossOfItsOwn(Base):
    """A rank whose loss is nan leaves the step before it calls backward."""

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        if bool((batch["kind"] == 1).all()):
            return StepResult({})
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


CLASSES = (
    WholeParameterInTheSameGroup,
    HeadsByRank,
    Experts,
    ClippedByHand,
    SignsAndMasks,
    ResNet,
)
FAULTS = (
    SkipsOneLossOfItsOwn,
    HeadsInPythonList,
    HeadOnOneRank,
    ReadsNormOnOneRank,
)
ZOO = {cls.__name__: cls for cls in (*CLASSES, *FAULTS)}
