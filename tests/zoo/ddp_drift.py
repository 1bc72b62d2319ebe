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


class BareCenters(CenterLoss):
    """The same with a bare tensor and torch.autograd.grad; nothing averages its result."""

    def configure(self, ctx):
        model = mlp(6, 3)
        centers = torch.zeros(2, 3, requires_grad=True)
        return {"model": model, "centers": centers, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}

    def train_step(self, batch, state, ctx):
        centers = state["centers"]
        features = state["model"](batch["x"])
        loss = (features - centers[batch["kind"]]).square().mean()
        (by_centers,) = torch.autograd.grad(loss, centers, retain_graph=True)
        state["optimizer"].zero_grad()
        loss.backward(inputs=list(state["model"].parameters()))
        state["optimizer"].step()
        with torch.no_grad():
            centers -= 0.5 * by_centers
        return StepResult({})


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


class FunctionalBesideBackward(Base):
    """Uses backward for one half of the parameters and torch.func for the other; makes two updates in a step."""

    def configure(self, ctx):
        model = mlp()
        optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
        return {"model": model, "optimizers": optimizers}

    def train_step(self, batch, state, ctx):
        model, (first, last) = state["model"], state["optimizers"]
        model.zero_grad()
        self.loss(batch, state).backward()
        first.step()

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            head = torch.func.functional_call(model[2], parameters, (model[1](model[0](batch["x"])).detach(),))
            return mse_loss(head, batch["y"])

        grads = torch.func.grad(loss)({name: p.detach() for name, p in model[2].named_parameters()})
        for name, p in model[2].named_parameters():
            p.grad = grads[name]
        nn.utils.clip_grad_norm_(model[2].parameters(), 0.05)
        last.step()
        return StepResult({})


class Reptile(Base):
    """Trains a clone within the step; the gradient is the distance that the clone moved.

    With one inner step over all rows this is a true gradient, so that ranks can be compared with one process.
    """

    optimizer = Trainer.optimizer

    def train_step(self, batch, state, ctx):
        model = state["model"]
        clone = copy.deepcopy(model)
        inner = torch.optim.SGD(clone.parameters(), lr=0.1)
        inner.zero_grad()
        self.loss(batch, {"model": clone}).backward()
        inner.step()
        for p, moved in zip(model.parameters(), clone.parameters(), strict=True):
            p.grad = p.detach() - moved.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        state["optimizer"].step()
        return StepResult({})


class EvolutionInTwoRounds(Base):
    """Writes gradients from antithetic perturbations twice in a step; clips and uses them each time."""

    @torch.no_grad()
    def train_step(self, batch, state, ctx):
        model = state["model"]
        generator = torch.Generator().manual_seed(len(batch))
        for _ in range(2):
            state["optimizer"].zero_grad()
            for p in model.parameters():
                noise = 0.05 * torch.randn(p.shape, generator=generator)
                p += noise
                above = self.loss(batch, state)
                p -= 2 * noise
                below = self.loss(batch, state)
                p += noise
                p.grad = noise * (above - below) * 100
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            state["optimizer"].step()
        return StepResult({})


class Relocated(SplatDensification, abstract=True):
    """Replaces its points by as many new ones; the class of the table adds points."""

    first = 2


class Momentum(Base):
    """A moving copy for contrast; its parameters require gradients and never get any."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "slow": copy.deepcopy(state["model"])}

    def loss(self, batch, state):
        with torch.no_grad():
            target = state["slow"](batch["x"])
        return mse_loss(state["model"](batch["x"]), 0.5 * (batch["y"] + target))

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        for slow, p in zip(state["slow"].parameters(), state["model"].parameters(), strict=True):
            slow.lerp_(p, 0.1)


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


class ReptileInPlace(Reptile):
    """Writes into existing gradients without autograd."""

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
    "BareCenters": r"`train_step`: torch\.autograd\.grad returns this rank's gradients of parameters that no optimizer",
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
