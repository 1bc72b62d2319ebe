"""Classes that change weights without the optimizer, around forward calls without a backward call; sharded."""

from types import SimpleNamespace

import torch
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import mlp, trainers
from .small import Base


class LooksEverywhere(Base):
    """A forward call without backward at some place of a step; subclasses choose how and where."""

    place = ""
    grad = False

    def look(self, here, batch, state):
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

    def loss(self, batch, state):
        state["calls"] += 1
        if state["calls"] % 2:
            self.copy(state)
        with torch.no_grad():
            goal = batch["y"] + 0.5 * state["target"](batch["x"])
        return mse_loss(state["model"](batch["x"]), goal)


class HardTargetCopyThroughData(HardTargetCopy):
    through_data = True


class WritesWhileGathered(Base):
    """Changes the weights between a forward call with a graph and the next update, like spectral clipping."""

    def train_step(self, batch, state, ctx):
        seen = state["model"](batch["x"]).detach().mean()
        for p in state["model"].parameters():
            self.shrink(p)
        result = super().train_step(batch, state, ctx)
        return StepResult({**result.metrics, "seen": seen})

    @torch.no_grad()
    def shrink(self, parameter):
        parameter.mul_(0.95)


class WritesWhileGatheredThroughData(WritesWhileGathered):
    def shrink(self, parameter):
        parameter.data.mul_(0.95)


class RestoresBestWeights(Base):
    """Keeps copies of the best weights and restores them, with an evaluation before and after."""

    def configure(self, ctx):
        return {**super().configure(ctx), "calls": 0, "best": SimpleNamespace(weights=None)}

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        if state["calls"] == 2:
            self.best = {k: v.clone() for k, v in state["model"].state_dict().items()}
        return super().train_step(batch, state, ctx)

    def after_update(self, batch, state, ctx):
        if state["calls"] == 3:
            state["model"](batch["x"])
            state["model"].load_state_dict(self.best)
            state["model"](batch["x"])


class PenalisesWeights(Base):
    """An L1 and an L2 term in the loss, over parameters that a forward call has already used."""

    def loss(self, batch, state):
        loss = super().loss(batch, state)
        loss = loss + 0.01 * sum(p.square().sum() for p in state["model"].parameters())
        return loss + 0.001 * sum(p.abs().sum() for p in state["model"].parameters())


class PenalisesWeightsFirst(Base):
    """Computes the penalty before any forward call of the step."""

    def loss(self, batch, state):
        penalty = 0.01 * sum(p.square().sum() for p in state["model"].parameters())
        return super().loss(batch, state) + penalty


class RenormalisedRows(Base):
    """Scales the rows of the first layer to unit length after each update (an nGPT-like constraint)."""

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        state["model"](batch["x"])
        w = state["model"][0].weight
        w.div_(w.norm(dim=1, keepdim=True))


ZOO = {**trainers(globals(), without=(LooksEverywhere,)), **LOOKING}
REFUSED: dict[str, str] = {}
