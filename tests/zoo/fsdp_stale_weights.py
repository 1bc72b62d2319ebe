"""Trainer classes that change weights without the optimizer, around forward calls without a backward call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult
from zoo.small import Base, mlp


class LooksEverywhere(Base):
    """A forward call without backward at some place of a step; subclasses choose how and where."""

    place = ""
    grad = False

    def look(self, here: str, batch: Any, state: Any) -> None:
        if here in self.place.split():
            with torch.set_grad_enabled(self.grad):
                self.last_look = mse_loss(state["model"](batch["x"]), batch["y"]).item()

    def train_step(self, batch, state, ctx):
        self.look("first", batch, state)
        state["optimizer"].zero_grad()
        self.look("zeroed", batch, state)
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        self.look("forwarded", batch, state)
        loss.backward()
        self.look("backwarded", batch, state)
        state["optimizer"].step()
        self.look("stepped", batch, state)
        with torch.no_grad():
            for p in state["model"].parameters():
                p.mul_(0.99)
        self.look("last", batch, state)
        return StepResult({"loss": loss.detach()})


PLACES = ("first", "zeroed", "forwarded", "backwarded", "stepped", "last")
LOOKING = {
    f"{'Grad' if grad else 'NoGrad'}Look{place.title().replace(' ', '')}": type(
        "Looks", (LooksEverywhere,), {"place": place, "grad": grad}
    )
    for place in (*PLACES, " ".join(PLACES))
    for grad in (False, True)
}


class HardTargetCopy(Base):
    """A DQN's target network, overwritten every second step by tensors of ``state_dict()``."""

    through_data = False

    def configure(self, ctx):
        return {**super().configure(ctx), "target": mlp(), "calls": 0}

    def copy(self, state):
        source, target = state["model"].state_dict(), state["target"].state_dict()
        for name, value in source.items():
            (target[name].data if self.through_data else target[name]).copy_(value)

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        if state["calls"] % 2:
            self.copy(state)
        with torch.no_grad():
            goal = batch["y"] + 0.5 * state["target"](batch["x"])
        loss = mse_loss(state["model"](batch["x"]), goal)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class HardTargetCopyThroughData(HardTargetCopy):
    through_data = True


class WritesWhileGathered(Base):
    """Changes the weights between a forward call with a graph and the next update, like spectral clipping."""

    through_data = False

    def train_step(self, batch, state, ctx):
        seen = state["model"](batch["x"]).detach().mean()
        for p in state["model"].parameters():
            if self.through_data:
                p.data.mul_(0.95)
            else:
                with torch.no_grad():
                    p.mul_(0.95)
        result = super().train_step(batch, state, ctx)
        return StepResult({**result.metrics, "seen": seen})


class WritesWhileGatheredThroughData(WritesWhileGathered):
    through_data = True


class RestoresBestWeights(Base):
    """Keeps copies of the best weights and restores them, with an evaluation before and after."""

    def configure(self, ctx):
        return {**super().configure(ctx), "calls": 0, "best": SimpleNamespace(weights=None)}

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        if state["calls"] == 2:
            self.best = {k: v.clone() for k, v in state["model"].state_dict().items()}
        result = super().train_step(batch, state, ctx)
        if state["calls"] == 3:
            state["model"](batch["x"])
            state["model"].load_state_dict(self.best)
            state["model"](batch["x"])
        return result


class PenalisesWeights(Base):
    """An L1 and an L2 term in the loss, over parameters that a forward call has already used."""

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        loss = loss + 0.01 * sum(p.square().sum() for p in state["model"].parameters())
        loss = loss + 0.001 * sum(p.abs().sum() for p in state["model"].parameters())
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class PenalisesWeightsFirst(Base):
    """Computes the penalty before any forward call of the step."""

    def train_step(self, batch, state, ctx):
        penalty = 0.01 * sum(p.square().sum() for p in state["model"].parameters())
        loss = mse_loss(state["model"](batch["x"]), batch["y"]) + penalty
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class RenormalisedRows(Base):
    """Scales the rows of the first layer to unit length after each update (an nGPT-like constraint)."""

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        with torch.no_grad():
            state["model"](batch["x"])
            w = state["model"][0].weight
            w.div_(w.norm(dim=1, keepdim=True))
        return result


CLASSES: tuple[type[nn.Module] | type, ...] = (
    HardTargetCopy,
    HardTargetCopyThroughData,
    WritesWhileGathered,
    WritesWhileGatheredThroughData,
    RestoresBestWeights,
    PenalisesWeights,
    PenalisesWeightsFirst,
    RenormalisedRows,
)
ZOO = {**{cls.__name__: cls for cls in CLASSES}, **LOOKING}
