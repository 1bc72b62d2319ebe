"""Run a trainer's own ``evaluate`` for ``Trainer.validate``, ``Trainer.test`` and the validations within a training.

For these Lightning needs a step and a loader, and a trainer class has neither. `host_evaluation` gives the module both
for the length of such a run: a loader of one batch. Before that batch, the trainer evaluates itself as in training:
without autocast, with gradients enabled, and with modules in the modes that training set; but with averaged weights if
a callback puts them in place for a validation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from ...callbacks.evaluation.evaluate import Evaluate, scores_of
from ...callbacks.hook.events import callbacks_of, publish_scores
from ...callbacks.lightning_internals import attach_loaders, set_validation_source
from ..contract.exceptions import StartupContractError
from .hosted_trainer import HostedTrainer

log = logging.getLogger(__name__)

_KINDS = {TrainerFn.FITTING: "validation", TrainerFn.VALIDATING: "validation", TrainerFn.TESTING: "test"}


class _OneBatch:
    """A loader of one batch with one row, for callbacks that measure batches."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(1)])


def host_evaluation(hosted: HostedTrainer) -> None:
    """Have the module of `hosted` evaluate it when its Lightning trainer validates or tests, and at no other time.

    Lightning validates a training after each epoch, or as ``val_check_interval``, ``check_val_every_n_epoch`` and
    ``limit_val_batches`` say. An `Evaluate` callback has its own cadence and replaces Lightning's default.

    Raises:
        StartupContractError: An evaluation was requested, and the trainer class has no ``evaluate``.
    """
    module, trainer = hosted.module, hosted.module.trainer
    for kind in _KINDS.values():
        for name in _hooks(kind):
            module.__dict__.pop(name, None)
    called = _KINDS.get(trainer.state.fn) if trainer.state.fn is not None else None
    if called is None:
        return
    class_name = type(hosted.plugin).__name__
    can_evaluate = callable(getattr(hosted.plugin, "evaluate", None))
    if trainer.state.fn == TrainerFn.FITTING:
        has_schedule = _has_validation_schedule(trainer)
        has_own_cadence = any(isinstance(callback, Evaluate) for callback in callbacks_of(trainer))
        if is_overridden("validation_step", module) or (not has_schedule and (has_own_cadence or not can_evaluate)):
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
    # Only now: Lightning checks whether a module has them, and would look for validation data in every training.
    for name, hook in zip(_hooks(called), (_nothing, _nothing, partial(_report, hosted)), strict=True):
        setattr(module, name, hook)
    if trainer.state.fn == TrainerFn.FITTING:
        set_validation_source(trainer, _OneBatch())
    else:
        loaders = {"val_dataloaders": _OneBatch(), "test_dataloaders": _OneBatch()}
        attach_loaders(trainer, trainer.lightning_module, **loaders)


def _has_validation_schedule(trainer: pl.Trainer) -> bool:
    """Whether the trainer's arguments change Lightning's default schedule of validations."""
    interval = trainer.val_check_interval
    # An integer counts batches, a float is a share of an epoch.
    return type(interval) is int or interval != 1.0 or trainer.check_val_every_n_epoch != 1


def _hooks(kind: str) -> tuple[str, str, str]:
    return f"{kind}_step", f"on_{kind}_model_eval", f"on_{kind}_batch_start"


def _nothing(*_: Any) -> None: ...


def _report(hosted: HostedTrainer, *_: Any) -> None:
    """Restore the trainer if a checkpoint was named, and log the scores of rank 0."""
    module, trainer = hosted.module, hosted.module.trainer
    if trainer.sanity_checking:
        return  # the sanity check would run the trainer's whole evaluation, which may be costly, before the first step
    with torch.inference_mode(False), torch.enable_grad():
        hosted.restore()
        scores = scores_of(module)
    scores = trainer.strategy.broadcast(scores)
    step = hosted.count_steps()
    within_training = trainer.state.fn == TrainerFn.FITTING
    if within_training:
        publish_scores(trainer, scores, step)
    if within_training or step != trainer.global_step:
        scores = {"step": float(step), **scores}  # Lightning passes this entry to loggers as the step
    # They are equal on all ranks now; a mean could round them.
    module.log_dict(scores, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max", batch_size=1)
