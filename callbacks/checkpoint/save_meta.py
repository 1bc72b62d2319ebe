"""What the record of a checkpoint says of the moment at which it was saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from ..hook.events import run_state_of
from .format.record import RecordMeta
from .retention import WRITER
from .score_joining import comes_late

__all__ = ["meta_of_save", "said_to_stay"]

log = logging.getLogger(__name__)


def meta_of_save(
    trainer: pl.Trainer,
    run: RecordMeta,
    monitor: str | None,
    elapsed_s: float,
    trainer_checkpoint: Mapping[str, Any] | None,
    *,
    final: bool,
) -> RecordMeta:
    """`run` with what is true of this moment of `trainer`.

    Args:
        trainer: The trainer that saves.
        run: What every record of the run says.
        monitor: Name of the metric to record; None records none, and one that was not logged is warned of.
        elapsed_s: Training time so far, over all attempts.
        trainer_checkpoint: What the trainer's ``save_checkpoint`` hook returned.
        final: Whether it is the end of the run.
    """
    parameters = list(trainer.lightning_module.named_parameters(remove_duplicate=False))
    return replace(
        run,
        step=trainer.global_step,
        run_id=run.run_id or run_state_of(trainer).run_id,
        final=final,
        trainer_checkpoint=trainer_checkpoint,
        elapsed_s=elapsed_s,
        world_size=trainer.world_size,
        metrics={} if monitor is None else _monitored(trainer, monitor),
        writer=WRITER,
        parameters=frozenset(name for name, _ in parameters),
        trained=frozenset(name for name, parameter in parameters if parameter.requires_grad),
    )


def said_to_stay(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """By name, the tensors of `module` that training may leave as they are: frozen parameters, and buffers."""
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    return frozen | dict(module.named_buffers(remove_duplicate=False))


def _monitored(trainer: pl.Trainer, name: str) -> dict[str, float]:
    if comes_late(trainer, name):
        return {}  # what there is now is of an older step
    state = run_state_of(trainer)
    for source in (trainer.callback_metrics, state.eval_scores or {}, state.loss_stats or {}):
        if name in source:
            return {name: float(source[name])}
    log.warning("The metric %r by which checkpoints are kept had not been logged by step %d", name, trainer.global_step)
    return {}
