"""Lightning's hooks that are called inside of a step, where they are overridden."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["StepHooks", "step_hooks"]


@dataclass(frozen=True)
class StepHooks:
    """Hooks that callbacks or the module override; None where none of them does."""

    before_backward: Callable[[Tensor], None] | None = None
    after_backward: Callable[[], None] | None = None
    before_optimizer_step: Callable[[Optimizer], None] | None = None
    before_zero_grad: Callable[[Optimizer], None] | None = None

    def __bool__(self) -> bool:
        return any(vars(self).values())


def step_hooks(trainer: pl.Trainer, module: pl.LightningModule) -> StepHooks:
    """The overridden hooks among Lightning's four that happen inside a step, callbacks first, as Lightning does."""
    return StepHooks(
        before_backward=_hook(trainer, module, "on_before_backward"),
        after_backward=_hook(trainer, module, "on_after_backward"),
        before_optimizer_step=_hook(trainer, module, "on_before_optimizer_step"),
        before_zero_grad=_hook(trainer, module, "on_before_zero_grad"),
    )


def _hook(trainer: pl.Trainer, module: pl.LightningModule, name: str) -> Callable[..., None] | None:
    plain = getattr(pl.Callback, name).__code__
    callbacks = [
        functools.partial(method, trainer, module)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if getattr(method := getattr(callback, name), "__code__", None) is not plain
    ]
    method = getattr(module, name)
    if getattr(method, "__code__", None) is not getattr(pl.LightningModule, name).__code__:
        callbacks.append(method)
    if not callbacks:
        return None

    def call(*args: Any) -> None:
        for callback in callbacks:
            callback(*args)

    return call
