"""The moment after a module's own ``on_train_batch_end``, which Lightning calls after those of all callbacks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from .events import fire

__all__ = ["awaits_module_hook"]

_ANNOUNCES_ATTRIBUTE = "_genlight_announces_its_end"


def awaits_module_hook(trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Whether ``on_module_batch_end`` is still to come in this step; asked from an ``on_train_batch_end``.

    genlight's loop fires that event itself. Lightning's own loop has no such event, so there the module's hook is
    replaced, until it is called, by one that fires the event afterwards.

    Returns:
        False where the module has no hook of its own: nothing is then left to wait for.
    """
    hook = pl_module.on_train_batch_end
    if getattr(hook, "__func__", None) is pl.LightningModule.on_train_batch_end:
        return False
    is_fired_by_loop: bool | None = getattr(trainer.fit_loop.epoch_loop, "fires_module_batch_end", None)
    if is_fired_by_loop is not None:
        return is_fired_by_loop
    if not hasattr(hook, _ANNOUNCES_ATTRIBUTE):
        _announce_end_of_hook(trainer, pl_module)
    return True


def _announce_end_of_hook(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    hook = pl_module.on_train_batch_end
    is_of_instance = "on_train_batch_end" in vars(pl_module)

    def hook_and_event(*args: Any) -> None:
        if is_of_instance:
            pl_module.on_train_batch_end = hook  # type: ignore[method-assign]
        else:
            del pl_module.on_train_batch_end
        hook(*args)
        fire(trainer, "on_module_batch_end")

    setattr(hook_and_event, _ANNOUNCES_ATTRIBUTE, True)
    pl_module.on_train_batch_end = hook_and_event  # type: ignore[method-assign, assignment]
