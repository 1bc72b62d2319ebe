"""Which checkpoint a score is about that comes after the checkpoint was saved."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl

from ..hook.events import run_state_of
from .format.record import CheckpointRecord, RecordMeta
from .late_scores import add_late_score
from .retention import own_records
from .selection import list_checkpoints

__all__ = ["ScoreJoining", "comes_late"]

log = logging.getLogger(__name__)


def comes_late(trainer: pl.Trainer, monitor: str) -> bool:
    """Whether scores of that name come when training is steps ahead, so that the newest one is of an older step."""
    return bool(run_state_of(trainer).extra.get(_fact(monitor)))


class ScoreJoining:
    """Joins scores with the checkpoints of their step; for use on rank zero.

    Args:
        monitor: The score that checkpoints are kept by; None joins none.
    """

    def __init__(self, monitor: str | None) -> None:
        self._monitor = monitor
        self._in_flight: dict[int, float] = {}

    def hear(
        self,
        trainer: pl.Trainer,
        directory: Path,
        run: RecordMeta,
        scores: Mapping[str, float],
        step: int,
        saved: int | None,
    ) -> None:
        """Note `scores` of `step` where its checkpoint was saved already.

        Args:
            trainer: The trainer that trains.
            directory: Where the checkpoints are.
            run: Whose checkpoints they are.
            scores: What an evaluation has found.
            step: What it has evaluated.
            saved: The step of the save that began last in this fit.
        """
        value = math.nan if self._monitor is None else float(scores.get(self._monitor, math.nan))
        if self._monitor is None or not math.isfinite(value):
            return
        if step < trainer.global_step:
            run_state_of(trainer).extra[_fact(self._monitor)] = True
        elif step != saved:
            return  # the save of this step finds it among the metrics
        run_id = run.run_id or run_state_of(trainer).run_id
        found = [r for r in own_records(list_checkpoints(directory)) if r.step == step and r.run_id == run_id]
        if found:
            self._add(found, value)
        elif step != saved:
            log.warning("%s of step %d came when that step had no checkpoint any more", self._monitor, step)
        if step == saved:
            self._in_flight[step] = value  # it, or ``final`` of the same step, may still be on its way

    def rewind(self, step: int) -> None:
        """Forget the scores of steps after `step`, which come again."""
        self._in_flight = {at: value for at, value in self._in_flight.items() if at <= step}

    def note_durable(self, record: CheckpointRecord) -> None:
        """Join a checkpoint that has become durable with a score that came before that."""
        self._in_flight = {step: value for step, value in self._in_flight.items() if step >= record.step}
        if record.step in self._in_flight:
            self._add([record], self._in_flight[record.step])

    def _add(self, records: list[CheckpointRecord], value: float) -> None:
        assert self._monitor is not None
        try:
            add_late_score(records, self._monitor, value)
        except OSError as error:
            log.warning("%s of step %d is not kept: %s", self._monitor, records[0].step, error.strerror or error)


def _fact(monitor: str) -> str:
    return f"{monitor} comes late"
