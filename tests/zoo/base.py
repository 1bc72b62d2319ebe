"""Common parts of the classes: tiny data, tiny networks, and a register of all classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepContext, StepResult

ROWS = 8  # rows of a step, over all ranks
STEPS = 5
INTERRUPTED_AT = 3

ZOO: dict[str, type[Base]] = {}


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def regression(step: int) -> dict[str, torch.Tensor]:
    x = torch.randn(ROWS, 6, generator=generator(step))
    return {"x": x, "y": x.sum(1, keepdim=True).tanh()}


def images(step: int) -> dict[str, torch.Tensor]:
    g = generator(step)
    return {"x": torch.randn(ROWS, 1, 6, 6, generator=g), "y": torch.randint(0, 3, (ROWS,), generator=g)}


def tokens(step: int) -> dict[str, torch.Tensor]:
    g = generator(step)
    return {"x": torch.randint(0, 11, (ROWS, 6), generator=g), "y": torch.randint(0, 3, (ROWS,), generator=g)}


def labelled(step: int) -> dict[str, torch.Tensor]:
    g = generator(step)
    return {"x": torch.randn(ROWS, 6, generator=g), "y": torch.randint(0, 3, (ROWS,), generator=g)}


def mlp(inputs: int = 6, outputs: int = 1, hidden: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class LowRank(nn.Module):
    """A frozen layer with a trained adapter."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


class AveragesItsModel:
    """Mixin: an average of the weights in a copy of the model."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "ema": copy.deepcopy(state["model"]).requires_grad_(False)}

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        for average, p in zip(state["ema"].parameters(), state["model"].parameters(), strict=True):
            average.lerp_(p, 0.1)


class Trainer:
    """A regression with Adam on a small network; the state is a dict. Subclasses override parts."""

    kept: tuple[str, ...] = ()
    """Names in the state that `state_dict` returns."""

    def setup(self, ctx: StepContext) -> None:
        torch.manual_seed(0)

    def model(self) -> nn.Module:
        return mlp()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    def configure(self, ctx: StepContext) -> Any:
        model = self.model().to(ctx.device)
        return {"model": model, "optimizer": self.optimizer(model.parameters())}

    def prepare_batch(self, raw: Any, state: Any, ctx: StepContext) -> Any:
        return {k: v.to(ctx.device) for k, v in raw.items()}

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return mse_loss(state["model"](batch["x"]), batch["y"])

    def change_gradients(self, state: Any, ctx: StepContext) -> None:
        """Called between backward and update."""

    def after_update(self, batch: Any, state: Any, ctx: StepContext) -> None:
        """Called at the end of the step."""

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> StepResult:
        loss = self.loss(batch, state)
        optimizers = state.get("optimizers") or [state["optimizer"]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        self.change_gradients(state, ctx)
        for optimizer in optimizers:
            optimizer.step()
        self.after_update(batch, state, ctx)
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {name: state[name] for name in self.kept}

    def load_state_dict(self, state: Any, payload: dict[str, object], ctx: StepContext) -> None:
        state.update(payload)


def trainers(members: dict[str, Any], without: tuple[type, ...] = ()) -> dict[str, type[Trainer]]:
    """Return the trainer classes that a module defines, by name and in order; `members` are its globals."""
    classes = {name: cls for name, cls in members.items() if isinstance(cls, type) and issubclass(cls, Trainer)}
    return {n: cls for n, cls in classes.items() if cls.__module__ == members["__name__"] and cls not in without}


class Base(Trainer):
    """A class of the table."""

    rows: Callable[[int], dict[str, torch.Tensor]] = staticmethod(regression)
    loader: Callable[[int, int], Any] | None = None
    """Creates the loader for a rank and a world size; None reads `rows`."""
    differs: str = ""
    """Why data-parallel training differs from one process; empty if it does not."""
    per_rank: tuple[str, ...] = ()
    """Words in the paths of tensors that may differ between ranks."""
    resume_compares: str = "everything"
    """``weights`` if the other state cannot be compared between processes."""
    tolerance_alone: float = 0.0
    """Relative tolerance of one process in fp32."""
    tolerance: float = 1e-4
    """Relative tolerance of two ranks in fp32 against one process."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            assert cls.__name__ not in ZOO, cls.__name__
            ZOO[cls.__name__] = cls
