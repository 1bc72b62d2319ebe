"""Classes that change weights without the optimizer, around forward calls without a backward call; sharded."""

import torch
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import trainers
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


ZOO = {**trainers(globals(), without=(LooksEverywhere,)), **LOOKING}
REFUSED: dict[str, str] = {}
