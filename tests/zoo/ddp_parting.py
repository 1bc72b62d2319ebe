"""Trainer classes whose ranks diverge within a step."""

import math
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter import StepResult

from .base import mlp, trainers
from .ddp_drift import Base
from .runs import STEPS


def together() -> bool:
    """Whether there are several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class SkipsBeforeBackward(Base):
    """The rank with a bad row leaves the step as soon as it has its own loss."""

    bad_step = 3

    def configure(self, ctx):
        return {**super().configure(ctx), "calls": 0}

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        loss = self.loss(batch, state)
        if state["calls"] == self.bad_step and bool((batch["kind"] == 1).any()):
            loss = loss * math.nan
        if not torch.isfinite(loss):
            return StepResult({"loss": 0.0})
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class SkipsTheLastStep(SkipsBeforeBackward):
    """The same in the last step; no exchange follows."""

    bad_step = STEPS


class SkipsTheUpdate(Base):
    """All ranks call backward, but a rank with a large loss does not update."""

    def configure(self, ctx):
        return {**super().configure(ctx), "calls": 0}

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        loss = self.loss(batch, state)
        state["optimizer"].zero_grad()
        loss.backward()
        if state["calls"] == 3 and bool((batch["kind"] == 1).any()):
            return StepResult({"skipped": 1.0})
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class SkipsTheSecondUpdate(SkipsTheUpdate):
    """One rank makes an additional update after all ranks have read gradients."""

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        state["optimizer"].step()
        if state["calls"] == 3 and bool((batch["kind"] == 0).any()):
            state["optimizer"].step()
        return StepResult({})


class SkipsByTheNormOfGradients(SkipsTheUpdate):
    """The correct way: gradients are averaged, so all ranks skip the same step."""

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        loss = self.loss(batch, state)
        if state["calls"] == 3:
            loss = loss * torch.where(batch["kind"] == 1, math.nan, 1.0).sum()
        state["optimizer"].zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        if torch.isfinite(norm):
            state["optimizer"].step()
        return StepResult({"norm": norm})


class SkipsStepsTogether(SkipsTheUpdate):
    """Every second step trains nothing on all ranks."""

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        return Base.train_step(self, batch, state, ctx) if state["calls"] % 2 else StepResult({})


class LogsOnRankZero(Base):
    """Only rank 0 reads the norm of its gradients; then all ranks reduce the loss by hand."""

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        loss = self.loss(batch, state)
        loss.backward()
        metrics = {}
        if ctx.rank == 0:
            metrics["norm"] = sum(p.grad.norm() for p in state["model"].parameters())
        mean = loss.detach().clone()
        if together():
            dist.all_reduce(mean)
        state["optimizer"].step()
        return StepResult({**metrics, "loss": mean})


class LogsOnRankZeroBeforeABarrier(LogsOnRankZero):
    """The same with objects and a barrier."""

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        if ctx.rank == 0:
            float(state["model"][0].weight.grad.norm())
        if together():
            dist.barrier()
            names: list[Any] = [None, None]
            dist.all_gather_object(names, ctx.rank)
            assert names == [0, 1]
        state["optimizer"].step()
        return StepResult({})


class ReadsBetweenBackwardCalls(Base):
    """Only one rank reads a gradient between two backward calls."""

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        if ctx.rank == 1:
            float(state["model"][0].weight.grad.norm())
        self.loss(batch, state).backward()
        state["optimizer"].step()
        return StepResult({})


class UpdatesByHandOnOneRank(Base):
    """No optimizer; one rank leaves a step before it computes gradients."""

    def configure(self, ctx):
        return {"model": mlp(), "calls": 0}

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        if state["calls"] == 2 and bool((batch["kind"] == 1).any()):
            return StepResult({})
        parameters = list(state["model"].parameters())
        for p, g in zip(parameters, torch.autograd.grad(self.loss(batch, state), parameters), strict=True):
            p.data -= 0.1 * g
        return StepResult({})


class DensifiesByItsOwnRows(Base):
    """Adds points near a rank's own rows, so that ranks have different points."""

    def configure(self, ctx):
        points = nn.ParameterDict({"mean": nn.Parameter(torch.randn(6, 6))})
        return {"points": points, "optimizer": torch.optim.Adam(points.parameters(), lr=0.1), "calls": 0}

    def train_step(self, batch, state, ctx):
        points, optimizer = state["points"], state["optimizer"]
        state["calls"] += 1
        optimizer.zero_grad()
        torch.cdist(batch["x"], points["mean"]).min(1).values.mean().backward()
        optimizer.step()
        new = self.replacement(points["mean"], batch, ctx) if state["calls"] == 2 else None
        if new is not None:
            optimizer.state.pop(points["mean"])
            optimizer.param_groups[0]["params"][0] = points["mean"] = nn.Parameter(new)
        return StepResult({})

    def replacement(self, points, batch, ctx):
        """Return replacements for the points; None keeps them."""
        far = batch["x"][torch.cdist(batch["x"], points).min(1).values > 2 - ctx.rank]
        return torch.cat([points.detach(), far[: 1 + ctx.rank]])


class FreezesOnOneRank(SkipsTheUpdate):
    """Only one rank freezes its first layer during training."""

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        if state["calls"] == 3 and ctx.rank == 1:
            state["model"][0].requires_grad_(False)
        return Base.train_step(self, batch, state, ctx)


class FreezesFromTheStartOnOneRank(Base):
    """Only one rank builds its first layer frozen."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state["model"][0].requires_grad_(ctx.rank != 1)
        return state


class ReplacesOnOneRank(DensifiesByItsOwnRows):
    """Only one rank replaces its points, by the same number of points."""

    def replacement(self, points, batch, ctx):
        return points.detach().clone() if ctx.rank == 1 else None


class UpdatesTwiceInTheLastStep(SkipsTheUpdate):
    """Only one rank makes a second update; no step of the other rank matches it."""

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        result = Base.train_step(self, batch, state, ctx)
        if state["calls"] == STEPS and ctx.rank == 0 and together():
            Base.train_step(self, batch, state, ctx)
        return result


class CallsBackwardOnceMore(SkipsTheUpdate):
    """Only one rank calls backward twice in the last step."""

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        state["optimizer"].zero_grad()
        for _ in range(2 if state["calls"] == STEPS and ctx.rank == 0 else 1):
            self.loss(batch, state).backward()
        state["optimizer"].step()
        return StepResult({})


class UpdatesInBackward(Base):
    """A hook updates each parameter as soon as its gradient exists."""

    def configure(self, ctx):
        net = mlp()
        optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in net.parameters()}

        def update(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(update)
        return {"model": net, "optimizers": list(optimizers.values())}

    def train_step(self, batch, state, ctx):
        state["model"](batch["x"]).square().mean().backward()
        return StepResult({})


class KilledInBackward(SkipsTheUpdate):
    """A rank is killed within its backward call while the other exchanges gradients."""

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        loss = self.loss(batch, state)
        state["optimizer"].zero_grad()
        if state["calls"] == 3 and ctx.rank == 1:
            loss.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        state["optimizer"].step()
        return StepResult({})


REFUSED = {
    "SkipsBeforeBackward": (
        r"rank 0 calls backward \(at .*ddp_parting\.py:\d+, in train_step\) in step 3, "
        r"while rank 1 has ended the step without a backward call in step 3.*on all ranks or on none"
    ),
    "SkipsTheLastStep": r"while rank 1 has ended the step without a backward call in step 4",
    "SkipsTheUpdate": (
        r"rank 0 calls backward .* in step 4, while rank 1 calls backward .* in step 4\. Rank 0 has made 3 updates, "
        r"rank 1 2; the last one of rank 0 is at .*ddp_parting\.py:\d+, in train_step\..*on all ranks or on none"
    ),
    "SkipsTheSecondUpdate": r"rank 0 updates .* in step 3, while rank 1 calls backward .* in step 4.*number of",
    "ReadsBetweenBackwardCalls": (
        r"rank 1 calls backward \(at .*ddp_parting\.py:\d+, in train_step\) in step 2, right after it calls backward "
        r"\(at .*ddp_parting\.py:\d+, in train_step\).*read gradients between these calls on all ranks or on none"
    ),
    "UpdatesByHandOnOneRank": r"`train_step`: torch\.autograd\.grad returns this rank's gradients of .*call backward",
    "FreezesOnOneRank": (
        r'Ranks train different parameters in step 3: rank 0 trains state\["model"\]\.0\.bias, '
        r'state\["model"\]\.0\.weight, rank 1 does not\. Decide by values'
    ),
    "FreezesFromTheStartOnOneRank": (
        r"Ranks 0 and 1 built different things: rank 0 has state\[.model.\]\.0\.weight \(12, 6\) torch.float32, "
        r"rank 1 has .* torch.float32 frozen"
    ),
    "CallsBackwardOnceMore": r"rank 0 calls backward .* in step 4, .*while rank 1 has ended the last step in step 4",
    "UpdatesTwiceInTheLastStep": r"rank 0 calls backward .* in step 4, while rank 1 has ended the last step in step 4",
    "UpdatesInBackward": r"a parameter has a hook that runs as soon as its gradient is accumulated .*update after",
    "ReplacesOnOneRank": r'ReplicaDriftError: .*the first is state\["points"\]\.mean',
    "DensifiesByItsOwnRows": r"Ranks train different parameters in step 3: ranks 0 and 1 have .* of different shapes",
}
"""Classes that end on both ranks; parts of the error message."""

RIGHT = [name for name in trainers(globals(), without=(KilledInBackward,)) if name not in REFUSED]
"""Classes that equal one process over the complete batch."""
