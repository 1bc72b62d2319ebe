"""A trainer's own ``evaluate`` behind ``Trainer.validate`` and ``Trainer.test``.

Lightning wants a step and a loader for these, which a trainer class has not. `host_evaluation` gives the module both
for as long as such a run lasts: one batch that nobody looks at, after which the trainer evaluates itself. What it sees
is what it sees in training: no autocast, gradients, and its modules in the mode in which it left them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from ...callbacks.evaluate import scores_of
from ..contract.exceptions import StartupContractError

if TYPE_CHECKING:
    from .module import ContractModule

__all__ = ["host_evaluation"]

_KINDS = {TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test"}
_ONE_BATCH = range(1)


def host_evaluation(module: ContractModule) -> None:
    """Have `module` evaluate its trainer where its Lightning trainer validates or tests, and nowhere else.

    Raises:
        StartupContractError: It is to be evaluated, and its trainer has no ``evaluate``.
    """
    for kind in _KINDS.values():
        for name in _hooks(kind):
            module.__dict__.pop(name, None)
    trainer = module.trainer
    called = _KINDS.get(trainer.state.fn) if trainer.state.fn is not None else None
    if called is None:
        return
    plugin = module.plugin
    if not callable(getattr(plugin, "evaluate", None)):
        raise StartupContractError(
            "startup.invalid_trainer",
            f"{type(plugin).__name__} has no `evaluate(state, ctx)` to validate or test it by. Add one that returns a "
            "mapping of scores.",
        )
    # Only now: Lightning goes by whether a module has them, and would look for validation data in every training.
    for name, hook in zip(_hooks(called), (_nothing, _nothing, partial(_report, module)), strict=True):
        setattr(module, name, hook)
    trainer._data_connector.attach_dataloaders(module, val_dataloaders=_ONE_BATCH, test_dataloaders=_ONE_BATCH)


def _hooks(kind: str) -> tuple[str, str, str]:
    return f"{kind}_step", f"on_{kind}_model_eval", f"on_{kind}_epoch_end"


def _nothing(*_: Any) -> None: ...


def _report(module: ContractModule) -> None:
    """Restore the trainer, where a checkpoint was named, and log the scores of rank 0."""
    with torch.inference_mode(False), torch.enable_grad():
        module.restore_trainer()
        scores = scores_of(module)
    if module.restored_step != module.trainer.global_step:
        scores = {"step": float(module.restored_step), **scores}  # Lightning's word for the step that loggers get.
    scores = module.trainer.strategy.broadcast(scores)
    module.log_dict(scores, sync_dist=True, reduce_fx="max")  # They are equal on all ranks now; a mean could round.
