"""Lightning's callbacks that take the weights in ``setup``: they get their turn once `configure` has built them.

Lightning sets up callbacks before the module, whose layers it expects from its constructor; a trainer class builds its
own in ``configure``. So the ``setup`` of these callbacks waits for that of the module; that of all others does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.optim import Optimizer

from ...callbacks.hook.events import callbacks_of
from ...callbacks.log_metrics import LogMetrics
from ...callbacks.replicas.replica_guard import ReplicaGuard

__all__ = [
    "defer_setups",
    "faults_of_callbacks",
    "missing_callbacks",
    "run_deferred_setups",
    "train_what_optimizers_hold",
    "without_masks",
]

_TAKE_WEIGHTS = (BaseFinetuning, ModelPruning, WeightAveraging)
_COPY_WEIGHTS = (ModelPruning, WeightAveraging)


def faults_of_callbacks(trainer: pl.Trainer) -> list[str]:
    """Why callbacks of `trainer` cannot work with a trainer class, each with the way out."""
    faults = []
    for callback in callbacks_of(trainer):
        name = type(callback).__name__
        if isinstance(callback, GradientAccumulationScheduler):
            faults.append(f"{name}: the trainer class owns gradient accumulation; do it in train_step")
        elif isinstance(callback, StochasticWeightAveraging):
            faults.append(
                f"{name} replaces the learning rate's schedule and trains an epoch without updates, which the trainer "
                "class owns; use lightning.pytorch.callbacks.WeightAveraging, or torch.optim.swa_utils in the class"
            )
        elif isinstance(callback, _COPY_WEIGHTS) and isinstance(trainer.strategy, ModelParallelStrategy):
            faults.append(f"{name} works on whole weights, and ModelParallelStrategy shards them; use ddp")
    return faults


def missing_callbacks(trainer: pl.Trainer, *, metric_every: int) -> list[pl.Callback]:
    """What every training of a trainer class needs and `trainer` was not given."""
    present = callbacks_of(trainer)
    missing: list[pl.Callback] = []
    if not any(isinstance(callback, LogMetrics) for callback in present):
        missing.append(LogMetrics(every_n_steps=metric_every))
    if trainer.world_size > 1 and not any(isinstance(callback, ReplicaGuard) for callback in present):
        missing.append(ReplicaGuard())
    return missing


def defer_setups(trainer: pl.Trainer) -> None:
    """Have callbacks that take the weights in ``setup`` wait for `run_deferred_setups`."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, _TAKE_WEIGHTS):
            callback.setup = _wait  # type: ignore[method-assign]


def run_deferred_setups(
    trainer: pl.Trainer, module: pl.LightningModule, stage: str, optimizers: Sequence[Optimizer]
) -> list[torch.nn.Parameter]:
    """Set the callbacks up that waited, in their order, and take what they freeze out of the optimizers.

    As in Lightning, where optimizers are made of what is left to train: what a callback unfreezes later it adds as a
    group of its own, with a learning rate of its own.

    Returns:
        What they froze.
    """
    frozen: list[torch.nn.Parameter] = []
    for callback in callbacks_of(trainer):
        if vars(callback).get("setup") is not _wait:
            continue
        del callback.setup
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        callback.setup(trainer, module, stage)
        frozen += [parameter for parameter in trained if not parameter.requires_grad]
    left_out = {id(parameter) for parameter in frozen}
    for group in _groups(optimizers) if frozen else ():
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in left_out]
    return frozen


def train_what_optimizers_hold(frozen: Sequence[torch.nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Of what was `frozen`, train what has come back: a resumed callback restores groups of parameters, frozen ones."""
    held = {id(parameter) for group in _groups(optimizers) for parameter in group["params"]}
    for parameter in frozen:
        if id(parameter) in held:
            parameter.requires_grad_(True)


def _wait(trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
    """In place of a callback's ``setup``, until the module has its weights."""


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def without_masks(payload: Any) -> Any:
    """A trainer's state with pruned weights as they are used, in place of what ``torch.nn.utils.prune`` keeps of them.

    So that the class, whose modules are not pruned yet when a run resumes, can load it.
    """
    if isinstance(payload, Mapping):
        masked = [name[: -len("_mask")] for name in payload if isinstance(name, str) and name.endswith("_mask")]
        pruned = {
            name: payload[f"{name}_orig"] * payload[f"{name}_mask"].to(payload[f"{name}_orig"].dtype)
            for name in masked
            if all(isinstance(payload.get(f"{name}_{part}"), torch.Tensor) for part in ("orig", "mask"))
        }
        parts = {f"{name}_{part}" for name in pruned for part in ("orig", "mask")}
        kept = {name: without_masks(value) for name, value in payload.items() if name not in parts}
        return {**kept, **pruned}
    if isinstance(payload, list):
        return [without_masks(value) for value in payload]
    return payload
