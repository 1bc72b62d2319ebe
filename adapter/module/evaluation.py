"""A trainer's own ``evaluate`` behind ``Trainer.validate``, ``Trainer.test`` and the validations within a training.

Lightning wants a step and a loader for these, which a trainer class does not have. `host_evaluation` gives the module
both for as long as such a run lasts: one batch, before which the trainer evaluates itself. It runs as in training:
without autocast, with gradients enabled, and with modules in the modes that training set; but with averaged weights if
a callback puts them in place for a validation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from ...callbacks.evaluation.evaluate import Evaluate, scores_of
from ...callbacks.hook.events import callbacks_of, publish_scores
from ...callbacks.lightning_internals import attach_loaders, set_validation_source
from ..contract.exceptions import StartupContractError

if TYPE_CHECKING:
    from .module import ContractModule

__all__ = ["host_evaluation"]

log = logging.getLogger(__name__)

_KINDS = {TrainerFn.FITTING: "validation", TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test"}


class _OneBatch:
    """A loader of one batch with one row, for callbacks that measure what they are handed."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(1)])


def host_evaluation(module: ContractModule) -> None:
    """Have `module` evaluate its trainer where its Lightning trainer validates or tests, and nowhere else.

    A training is validated when its Lightning trainer validates: after each epoch unless it was told otherwise, by
    ``val_check_interval`` or ``check_val_every_n_epoch``, or not to, by ``limit_val_batches=0``. An `Evaluate` callback
    has a cadence of its own, and takes the place of Lightning's default.

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
    class_name = type(module.plugin).__name__
    can_evaluate = callable(getattr(module.plugin, "evaluate", None))
    if trainer.state.fn == TrainerFn.FITTING:
        is_told = _is_told_when(trainer)
        has_own_cadence = any(isinstance(callback, Evaluate) for callback in callbacks_of(trainer))
        if is_overridden("validation_step", module) or (not is_told and (has_own_cadence or not can_evaluate)):
            return
        if not can_evaluate:
            log.warning(
                "val_check_interval=%r and check_val_every_n_epoch=%r have no effect: %s has no `evaluate(state, ctx)`",
                trainer.val_check_interval,
                trainer.check_val_every_n_epoch,
                class_name,
            )
            return
    elif not can_evaluate:
        raise StartupContractError(
            "startup.invalid_trainer",
            f"{class_name} has no `evaluate(state, ctx)` to validate or test with. Add one that returns a mapping of "
            "scores.",
        )
    # Only now: Lightning goes by whether a module has them, and would look for validation data in every training.
    for name, hook in zip(_hooks(called), (_nothing, _nothing, partial(_report, module)), strict=True):
        setattr(module, name, hook)
    if trainer.state.fn == TrainerFn.FITTING:
        set_validation_source(trainer, _OneBatch())
    else:
        loaders = {"val_dataloaders": _OneBatch(), "test_dataloaders": _OneBatch()}
        attach_loaders(trainer, trainer.lightning_module, **loaders)


def _is_told_when(trainer: pl.Trainer) -> bool:
    """Whether something else than Lightning's default was asked for."""
    interval = trainer.val_check_interval
    # An integer counts batches, a float is a share of an epoch.
    return type(interval) is int or interval != 1.0 or trainer.check_val_every_n_epoch != 1


def _hooks(kind: str) -> tuple[str, str, str]:
    return f"{kind}_step", f"on_{kind}_model_eval", f"on_{kind}_batch_start"


def _nothing(*_: Any) -> None: ...


def _report(module: ContractModule, *_: Any) -> None:
    """Restore the trainer, where a checkpoint was named, and log the scores of rank 0."""
    trainer = module.trainer
    if trainer.sanity_checking:
        return  # of a validation there is only the trainer's own code, and that may be costly before the first step
    with torch.inference_mode(False), torch.enable_grad():
        module.restore_trainer()
        scores = scores_of(trainer.lightning_module)
    scores = trainer.strategy.broadcast(scores)
    within_training = trainer.state.fn == TrainerFn.FITTING
    if within_training:
        publish_scores(trainer, scores, module.restored_step)
    if within_training or module.restored_step != trainer.global_step:
        scores = {"step": float(module.restored_step), **scores}  # Lightning's word for the step that loggers get.
    # They are equal on all ranks now; a mean could round.
    trainer.lightning_module.log_dict(
        scores, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max", batch_size=1
    )
