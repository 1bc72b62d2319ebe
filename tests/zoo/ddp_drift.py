"""Trainer classes whose replicas would drift if only gradients of optimized parameters were averaged, in backward."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from genlight.adapter import StepResult

from .base import Trainer, mlp, trainers
from .vision import SplatDensification


class Base(Trainer):
    """A regression with SGD; every class of this file is a variation of it."""

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)


class CenterLoss(Base):
    """The trainer moves class centers by their gradients; an optimizer holds the other parameters."""

    def configure(self, ctx):
        model, centers = mlp(6, 3), nn.Embedding(2, 3)
        return {"model": model, "centers": centers, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}

    def loss(self, batch, state):
        return (state["model"](batch["x"]) - state["centers"](batch["kind"])).square().mean()

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        for center in state["centers"].parameters():
            if center.grad is not None:
                center -= 0.5 * center.grad
                center.grad = None


class CentersOfOneRank(CenterLoss):
    """Each class has its own center; the other rank's rows never touch it."""

    def configure(self, ctx):
        model = mlp(6, 3)
        centers = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
        return {"model": model, "centers": centers, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}

    def loss(self, batch, state):
        features = state["model"](batch["x"])
        loss = torch.zeros(())
        for kind, center in enumerate(state["centers"]):
            mine = batch["kind"] == kind
            if mine.any():
                loss = loss + (features[mine] - center).square().sum() / len(batch["x"])
        return loss


class Relocated(SplatDensification, abstract=True):
    """Replaces its points by as many new ones; the class of the table adds points."""

    first = 2


class FunctionalWithoutGrad(Base):
    """Gradients of torch.func that never enter ``.grad``; genlight cannot see their use."""

    def train_step(self, batch, state, ctx):
        model = state["model"]

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return mse_loss(torch.func.functional_call(model, parameters, (batch["x"],)), batch["y"])

        grads = torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * grads[name]
        return StepResult({})


class ReptileInPlace(Base):
    """Trains a clone within the step; writes the distance that it moved into existing gradients, without autograd."""

    optimizer = Trainer.optimizer

    def train_step(self, batch, state, ctx):
        model = state["model"]
        clone = copy.deepcopy(model)
        inner = torch.optim.SGD(clone.parameters(), lr=0.1)
        self.loss(batch, {"model": clone}).backward()
        inner.step()
        for p, moved in zip(model.parameters(), clone.parameters(), strict=True):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad.data.zero_()
            p.grad.data.add_(p.data - moved.data)
        state["optimizer"].step()
        return StepResult({})


class NoiseOfEachRank(Base):
    """Weight noise from generators that differ by rank."""

    def configure(self, ctx):
        return {**super().configure(ctx), "generator": torch.Generator().manual_seed(ctx.rank)}

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        weight = state["model"][2].weight
        weight += 0.001 * torch.randn(weight.shape, generator=state["generator"])


class Memory(nn.Module):
    """Keeps the last inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(16, 6))

    def remember(self, x: Tensor) -> None:
        self.kept.copy_(torch.cat([self.kept, x])[-len(self.kept) :])


class MemoryOfOwnRows(Base):
    """Each rank keeps its own rows in a module without an optimizer."""

    def configure(self, ctx):
        return {**super().configure(ctx), "memory": Memory()}

    def train_step(self, batch, state, ctx):
        state["memory"].remember(batch["x"])
        return super().train_step(batch, state, ctx)


class DeclaredMemory(MemoryOfOwnRows):
    """The same, declared."""

    rank_local = ("memory",)


class DeclaredLatents(Base):
    """Latents of a rank's rows with a separate optimizer and a different shape on each rank."""

    rank_local = ("latents", "trainer.unused")

    def configure(self, ctx):
        state = super().configure(ctx)
        latents = torch.full((2 + ctx.rank, 3), float(ctx.rank), requires_grad=True)
        return {**state, "latents": latents, "inner": torch.optim.Adam([latents], lr=0.1)}

    def train_step(self, batch, state, ctx):
        state["inner"].zero_grad()
        (state["latents"] - ctx.rank - 1).square().sum().backward()
        assert torch.all(state["latents"].grad == -2), "another rank's gradient has come in"
        state["latents"].data.fill_(ctx.rank)
        state["inner"].step()
        state["latents"].data.fill_(ctx.rank)
        return super().train_step(batch, state, ctx)


class ShardedMomentum(torch.optim.Optimizer):
    """Like some Muons: each rank keeps the momenta of its share of parameters and broadcasts the updated ones."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if i % ranks == rank:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"])
                if ranks > 1:
                    dist.broadcast(p, src=i % ranks)


class ShardsItsOptimizer(Base):
    """Does not declare the sharded optimizer."""

    def optimizer(self, parameters):
        return ShardedMomentum(parameters, lr=0.05)


class DeclaresItsShardedOptimizer(ShardsItsOptimizer):
    """Declares it by its name in the state."""

    rank_local = ("optimizer",)


class OptimizerThatSaysSo(ShardedMomentum):
    rank_local = True


class HasAnOptimizerThatSaysSo(Base):
    """Declares it by the optimizer's class."""

    def optimizer(self, parameters):
        return OptimizerThatSaysSo(parameters, lr=0.05)


DECLARED = ("DeclaredMemory", "DeclaredLatents")
"""Equal but for what is each rank's own."""

REFUSED = {
    "CentersOfOneRank": r'in step 1: rank 0 trains state\["centers"\]\.0, rank 1 does not; rank 1 trains .*\.1, rank 0',
    "FunctionalWithoutGrad": r'first is state\["model"\]\.0\.weight: rank 0 \(.* at 0\) and rank 1 \(.* torch\.func',
    "ReptileInPlace": r'first is state\["model"\]\.0\.weight: .*changed in place',
    "NoiseOfEachRank": r'first is state\["model"\]\.2\.weight: .* random numbers that differ between ranks',
    "ShardsItsOptimizer": r'first is .*momentum of state\["model"\].* an optimizer that shards its state',
}
"""Classes that are refused, or ended by the comparison of replicas; parts of the message."""

WITHOUT = (Base, MemoryOfOwnRows)
RIGHT = [name for name in trainers(globals(), WITHOUT) if name not in REFUSED and name not in DECLARED]
"""Classes that equal one process over the complete batch."""
