"""Trainer classes that compute with gradients and norms themselves, or use modules on some ranks only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult
from zoo.small import Base, mlp


class ListOptimizer:
    """Signed momentum over a list of parameters; no torch optimizer."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        self.parameters = list(parameters)
        self.momenta = [torch.zeros_like(p) for p in self.parameters]
        self.lr = lr

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, m in zip(self.parameters, self.momenta, strict=True):
            if p.grad is not None:
                m.mul_(0.9).add_(p.grad)
                p.sub_(self.lr * m)


class WithListOptimizer(Base):
    def configure(self, ctx):
        model = mlp()
        return {"model": model, "optimizer": ListOptimizer(model.parameters())}


class WholeParameterInTheSameGroup(Base):
    """A parameter of no module stays whole; operations on lists of tensors, torch's choice on a device, have it too."""

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


class AsksForGradients(Base):
    """Two tasks weighed by the norms of their gradients, which torch.autograd.grad gives, before the backward."""

    def configure(self, ctx):
        model = nn.Module()
        model.body, model.one, model.other = mlp(6, 5), nn.Linear(5, 1), nn.Linear(5, 1)
        model.scale = nn.Parameter(torch.ones(5))
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01)}

    def train_step(self, batch, state, ctx):
        model = state["model"]
        state["optimizer"].zero_grad()
        hidden = model.body(batch["x"])
        losses = [mse_loss(model.one(hidden), batch["y"]), model.other(hidden).square().mean()]
        losses[1] = losses[1] + 0.1 * model.body[0].weight.square().sum()
        norms = []
        for loss in losses:
            given = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True, allow_unused=True)
            norms.append(sum(float(g.norm()) for g in given if g is not None))
            assert [g is None for g in given].count(True) == 3  # the other head, and the scale
        (losses[0] / norms[0] + losses[1] / norms[1]).backward()
        state["optimizer"].step()
        return StepResult({"loss": losses[0].detach()})


class ProductsByHand(Base):
    """Weights in products outside of any call of their module: tied ones, a matrix of its own, and gradients."""

    def configure(self, ctx):
        model = nn.Module()
        model.body, model.matrix = mlp(6, 6), nn.Parameter(torch.eye(6))
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01)}

    def train_step(self, batch, state, ctx):
        model, first = state["model"], state["model"].body[0].weight
        hidden = torch.einsum("bi,ij->bj", model.body(batch["x"]), model.matrix) + batch["x"] @ model.matrix.T
        out = nn.functional.linear(hidden, first).mean(1, keepdim=True)
        loss = mse_loss(out, batch["y"]) + 0.1 * (first.T @ first - torch.eye(6)).square().sum()
        state["optimizer"].zero_grad()
        loss.backward()
        away = torch.linalg.qr(torch.arange(18.0).view(6, 3).sin())[0]
        first.grad = first.grad - (first.grad @ away) @ away.T
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class HeadsByRank(Base):
    """A head for each half of the rows, of which each rank trains one; a third that nobody trains."""

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
    """The heads are modules of their own, so that ranks gather different ones."""

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
    """A norm for the log that rank 0 alone looks at."""

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


class PolyakSteps(Base):
    """The size of a step from the loss and the float of a gradient's norm."""

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(state["model"].parameters(), float("inf")))
        with torch.no_grad():
            for p in state["model"].parameters():
                p.sub_(0.05 / (norm + 0.1) * p.grad)
        return StepResult({"grad_norm": norm})


class ClippedByHand(Base):
    """A norm that is summed by hand, in three ways."""

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


class SeededNoise(Base):
    """Noise on weights from torch's own generator, seeded alike on all ranks in each step."""

    def train_step(self, batch, state, ctx):
        self.calls = getattr(self, "calls", 0) + 1
        result = super().train_step(batch, state, ctx)
        torch.manual_seed(self.calls)
        with torch.no_grad():
            for p in state["model"].parameters():
                p.add_(torch.randn_like(p) * 0.01)
        if self.calls == 2:
            nn.init.normal_(state["model"][2].weight, std=0.1)
        return result


class WritesWholeGradients(Base):
    """Keeps gradients of this rank, computed without the engine, and writes them to ``.grad``."""

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        for p in state["model"].parameters():
            p.grad = torch.full(p.shape, 0.1 if ctx.world_size == 1 else 0.05 + 0.1 * ctx.rank)
        state["optimizer"].step()
        return StepResult({})


class SignsAndMasks(Base):
    """Updates by the sign of gradients, masked by their size against a global threshold."""

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


class KeepsItsBestWeights(Base):
    """A copy of the weights of the lowest loss, which each rank has for itself."""

    rank_local = ("best",)

    def configure(self, ctx):
        return {**super().configure(ctx), "best": mlp().requires_grad_(False), "lowest": float("inf")}

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        loss = float(mse_loss(batch["x"].mean(), batch["y"].mean()))
        if loss < state["lowest"]:
            state["lowest"] = loss
            state["best"].load_state_dict(state["model"].state_dict())
        return result


class SkipsOneLossOfItsOwn(Base):
    """A rank whose own loss is nan leaves the step before its backward."""

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        if bool((batch["kind"] == 1).all()):
            return StepResult({})
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


CLASSES = (
    WithListOptimizer,
    WholeParameterInTheSameGroup,
    AsksForGradients,
    ProductsByHand,
    HeadsByRank,
    Experts,
    PolyakSteps,
    ClippedByHand,
    SeededNoise,
    WritesWholeGradients,
    SignsAndMasks,
    ResNet,
)
FAULTS = (
    SkipsOneLossOfItsOwn,
    HeadsInPythonList,
    HeadOnOneRank,
    ReadsNormOnOneRank,
    KeepsItsBestWeights,
)
ZOO = {cls.__name__: cls for cls in (*CLASSES, *FAULTS)}
