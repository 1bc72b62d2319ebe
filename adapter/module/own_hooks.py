"""Trainer hooks that a trainer class defines itself, such as losses: they receive the same events as other hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ...callbacks.hook.events import callbacks_of
from ...callbacks.hook.hook import order_callbacks
from ...callbacks.trainer_hooks import TrainerHookAdapter
from ..contract.exceptions import ContractError
from ..contract.types import StepContext
from .plugin_loading import optional_hook


class OwnHookAdapter(TrainerHookAdapter):
    """Runs a hook that is part of the training: on all ranks, before other callbacks; its failures end the run.

    ``on_mb_end`` comes before a checkpoint of the step is written, so the checkpoint holds the changes of the hook.

    Args:
        hook: Any object that has one of the events.

    Raises:
        TypeError: `hook` has none of the events, or is a class.
    """

    def __init__(self, hook: Any) -> None:
        super().__init__(hook)
        self.critical, self.ranks = True, "all"

    def on_mb_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do nothing: the hook got this event in `on_train_batch_end`, before the checkpoint of the step."""

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tell("on_mb_end", trainer, pl_module)


def own_hooks(plugin: Any, state: Any, ctx: StepContext) -> list[Any]:
    """Return the result of ``trainer_hooks`` of a trainer class; empty if it has none.

    Raises:
        ContractError: It did not return several objects.
    """
    hooks = optional_hook(plugin, "trainer_hooks")
    if hooks is None:
        return []
    returned = hooks(state, ctx)
    if isinstance(returned, Mapping | str) or not isinstance(returned, Iterable):
        kind = type(returned).__qualname__
        raise ContractError(f"trainer_hooks returned a {kind}; it must be a list of objects with events")
    return list(returned)


def attach_own_hooks(trainer: pl.Trainer, plugin: Any, state: Any, ctx: StepContext) -> None:
    """Add the hooks that ``trainer_hooks`` of a trainer class returns to `trainer`, before its callbacks.

    Raises:
        ContractError: One of them has no event, or is a class.
    """
    hooks = own_hooks(plugin, state, ctx)
    try:
        adapters = [OwnHookAdapter(hook) for hook in hooks]
    except TypeError as error:
        raise ContractError(f"trainer_hooks of {type(plugin).__qualname__}: {error}") from None
    others = [callback for callback in callbacks_of(trainer) if not isinstance(callback, OwnHookAdapter)]
    if adapters or len(others) < len(callbacks_of(trainer)):
        trainer.callbacks = [*adapters, *others]  # type: ignore[attr-defined]
        order_callbacks(trainer)
