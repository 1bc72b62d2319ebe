"""The events of a trainer class's own hooks in a plain loop, where no Lightning trainer fires them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
from torch.optim import Optimizer

from ...callbacks.hook.events import share_run_state
from ...callbacks.trainer_hooks import TrainerState
from ..contract.run_state import RunState
from ..contract.types import StepContext
from ..discovery.discover import Discovered
from ..module.own_hooks import own_hooks

__all__ = ["own_events"]


@dataclass(eq=False)
class PlainTraining:
    """In place of a Lightning trainer and module: what a `TrainerState` looks at."""

    contract_state: Any
    discovered: Discovered
    optimizers: Sequence[Optimizer]


def own_events(trainer: Any, state: Any, ctx: StepContext, discovered: Discovered) -> Callable[[str], None]:
    """What tells the hooks that ``trainer_hooks`` of a trainer class returns of an event, by its name."""
    hooks = own_hooks(trainer, state, ctx)
    training: Any = PlainTraining(state, discovered, [found.value for found in discovered.optimizers])
    if isinstance(ctx.run_state, RunState):
        share_run_state(training, ctx.run_state)
    trainer_state = TrainerState(cast("pl.Trainer", training), cast("pl.LightningModule", training))

    def fire(event: str) -> None:
        for hook in hooks:
            method = getattr(hook, event, None)
            if method is not None:
                method(trainer_state)

    return fire
