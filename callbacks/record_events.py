"""Brings what happens in a run to an event log that the run has opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ..reporters.events.attempt_report import AttemptReport
from ..reporters.events.event_log import EventLog
from .checkpoint.format.record import CheckpointRecord
from .hook.hook import Hook

__all__ = ["RecordEvents"]


class RecordEvents(Hook):
    """Writes ``started``, ``checkpoint`` and ``sample`` events. The run itself writes the terminal event.

    Metrics come from the `EventLogger` attached to the same log.

    Args:
        event_log: An open log.
        metadata: How the attempt came to be; goes into ``started``.
    """

    critical = True

    # On `on_train_start`, first of all callbacks, so that whatever another one logs there comes after `started`.

    def __init__(self, event_log: EventLog, metadata: Mapping[str, Any] | None = None) -> None:
        self.report = AttemptReport(event_log)
        self.metadata = metadata

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.report.begin(self.metadata)
        self.report.resume_from(trainer.global_step)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        self.report.prepare_checkpoint()

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        self.report.checkpoint(record.reported_path, record.step)

    @override
    def on_samples_written(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, paths: Sequence[Path], step: int
    ) -> None:
        self.report.samples(paths, step)
