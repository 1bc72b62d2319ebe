"""What the record of a checkpoint says of the moment at which it was saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from ..hook.events import run_state_of
from .format.record import RecordMeta
from .retention import WRITER

__all__ = ["meta_of_save"]

log = logging.getLogger(__name__)


def meta_of_save(
    trainer: pl.Trainer,
    run: RecordMeta,
    *,
    final: bool,
    elapsed_s: float,
    monitor: str | None,
    trainer_checkpoint: Mapping[str, Any] | None,
) -> RecordMeta:
    """`run` with what is true of this moment of `trainer`.

    Args:
        trainer: The trainer that saves.
        run: What every record of the run says.
        final: Whether it is the end of the run.
        elapsed_s: Training time so far, over all attempts.
        monitor: Name of the metric to record; None records none, and one that was not logged is warned of.
        trainer_checkpoint: What the trainer's ``save_checkpoint`` hook returned.
    """
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
        parameters=frozenset(name for name, _ in trainer.lightning_module.named_parameters()),
    )


def _monitored(trainer: pl.Trainer, name: str) -> dict[str, float]:
    state = run_state_of(trainer)
    for source in (trainer.callback_metrics, state.eval_scores or {}, state.loss_stats or {}):
        if name in source:
            return {name: float(source[name])}
    log.warning("The metric %r that checkpoints are kept by was not logged up to step %d", name, trainer.global_step)
    return {}
