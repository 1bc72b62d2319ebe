"""Trainer classes and old training functions for the comparison of a plain loop with genlight."""

import threading

import torch
from torch import nn

from genlight.adapter.contract.types import StepResult
from support.trainer_class import Stateless

COUNT = 4
"""Batches of a job."""


def batches(count: int = COUNT) -> list[dict[str, list[list[float]]]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.rand(4, 2, generator=generator).tolist(), "y": torch.rand(4, 1, generator=generator).tolist()}
        for _ in range(count)
    ]


class Plain(Stateless):
    """Draws its weights without seeding, has dropout and a schedule, and changes the raw batch."""

    lr = 0.01

    def configure(self, ctx):
        model, optimizer, schedule = build(ctx.job.max_steps, ctx.device, self.lr)
        return {"model": model, "optimizer": optimizer, "scheduler": schedule}

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw.pop("x")), torch.tensor(raw.pop("y"))

    def train_step(self, batch, state, ctx):
        loss = self.loss(state["model"](batch[0]) - batch[1])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        return StepResult({"loss": loss.detach()})

    def loss(self, error):
        return error.square().mean()


def build(steps, device, lr):
    """Return a network, its optimizer and its schedule."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


class Sums(Plain):
    def loss(self, error):
        return error.square().sum()


class Remembers(Plain):
    """Its class counts the steps of all its instances."""

    seen = 0

    def loss(self, error):
        type(self).seen += 1
        return super().loss(error) * type(self).seen


class BuildsAnother(Plain):
    made = 0

    def configure(self, ctx):
        type(self).made += 1
        torch.manual_seed(type(self).made)
        return super().configure(ctx)


class AnotherOptimizer(Plain):
    made = 0

    def configure(self, ctx):
        state = super().configure(ctx)
        type(self).made += 1
        if type(self).made % 2:
            state["extra"] = nn.Linear(1, 1)
        return state


class Raises(Plain):
    def train_step(self, batch, state, ctx):
        raise ArithmeticError("mine")


class Collects(Plain):
    """Draws what it collects, trains on each rollout twice, and leaves the second update early."""

    update_epochs = 2

    def rollout(self, state, ctx):
        collected = [{"x": torch.rand(4, 2).tolist(), "y": torch.rand(4, 1).tolist()} for _ in range(2)]
        return collected, {"agent_steps": 8}

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw["x"]), torch.tensor(raw["y"]) + ctx.run_state.agent_step + ctx.run_state.update_epoch

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        if ctx.run_state.update_epoch == 1 and ctx.run_state.agent_step == 16:
            ctx.run_state.stop_update_epoch = True
        return result


class CollectsLazily(Collects):
    def rollout(self, state, ctx):
        for _ in range(3):
            ctx.run_state.agent_step += 4
            yield {"x": torch.rand(4, 2).tolist(), "y": torch.rand(4, 1).tolist()}
            if ctx.run_state.agent_step > 20:
                ctx.run_state.stop_rollout = True


class CollectsNothing(Plain):
    def rollout(self, state, ctx):
        return iter(())


class NeverUpdates(Plain):
    def train_step(self, batch, state, ctx):
        return StepResult({"loss": 0.0})


class HasALock(Plain):
    def __init__(self):
        self.lock = threading.Lock()


INSTANCE = Plain()
LOCKED = HasALock()


def old_loop(batches, steps, device, *, lr=0.01, scale=1.0, first=lambda: None):
    """The same training, as somebody had it before."""
    first()
    model, optimizer, schedule = build(steps, device, lr)
    for batch in batches:
        loss = (model(torch.tensor(batch["x"])) - torch.tensor(batch["y"])).square().mean() * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def another_rate(batches, steps, device):
    old_loop(batches, steps, device, lr=0.02)


def four_times(batches, steps, device):
    old_loop(batches, steps, device, scale=4.0)


def another_start(batches, steps, device):
    old_loop(batches, steps, device, first=lambda: torch.manual_seed(17))


def other_rows(batches, steps, device):
    old_loop([{"x": batch["y"] and batch["x"][::-1], "y": batch["y"]} for batch in batches], steps, device)


def other_model(ctx):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def short(batches, steps, device):
    old_loop([next(batches)], steps, device)


def never_steps(batches):
    """Looks at a batch and leaves."""
    next(batches)


def wants_more(batches, config_file, verbose=False):
    raise AssertionError("is never called")


def with_a_closure(batches, steps, device):
    """Steps like Lightning's automatic optimization."""
    model, optimizer, schedule = build(steps, device, 0.01)
    for batch in batches:

        def closure(batch=batch):
            loss = (model(torch.tensor(batch["x"])) - torch.tensor(batch["y"])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()


def fails():
    raise LookupError("no such file of mine")
