"""Which checkpoints a run keeps, and which it never queued for upload.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .format.layout import is_record_of_callback
from .format.record import CheckpointRecord
from .scores import add_score
from .selection import Listed, list_checkpoints

if TYPE_CHECKING:
    from ...reporters.uploads import Uploader

__all__ = ["WRITER", "Kept", "Retention", "best_path", "is_named", "never_queued", "own_records", "to_delete"]

log = logging.getLogger(__name__)

WRITER = "Checkpoint"
"""How records name the `Checkpoint` callback as the one that may remove them."""


@dataclass(frozen=True)
class Retention:
    """What to keep; a checkpoint stays if any rule keeps it.

    Raises:
        ValueError: A number is out of range.
    """

    keep_last: int | None = 2
    """The newest step checkpoints; None keeps all."""
    keep_best: int = 1
    """The best by `monitor`, where one is set."""
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"Invalid `keep_last`. Expected a number >= 1, but received {self.keep_last}.")
        if self.keep_best < 0:
            raise ValueError(f"Invalid `keep_best`. Expected a number >= 0, but received {self.keep_best}.")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Invalid `mode`. Expected 'min' or 'max', but received {self.mode!r}.")


def to_delete(records: Sequence[CheckpointRecord], retention: Retention) -> list[CheckpointRecord]:
    """The records of one run that `retention` does not keep, oldest first.

    A final checkpoint, and one that an older runtime wrote, is never among them. Nor is the newest whose weights are
    finite: of a run that diverged it is the only one worth going on from.
    """
    if retention.keep_last is None:
        return []
    steps = sorted((r for r in records if not r.final and not r.is_old), key=lambda r: (r.step, r.created_at_ms))
    keep = {record.path for record in steps[-retention.keep_last :]}
    sound = [r for r in steps if r.finite_weights] or [r for r in steps if r.finite_weights is not False]
    keep |= {record.path for record in sound[-1:]}
    keep |= {record.path for record in _best(steps, retention)}
    return [record for record in steps if record.path not in keep]


def _best(records: Sequence[CheckpointRecord], retention: Retention) -> list[CheckpointRecord]:
    """The `keep_best` records with the best monitored value, best first; of equal ones the older."""
    if retention.monitor is None:
        return []
    sign = 1.0 if retention.mode == "min" else -1.0
    scored = []
    for record in records:
        value = record.metrics.get(retention.monitor)
        if value is not None and math.isfinite(value):
            scored.append((sign * value, record.step, record))
    return [record for _, _, record in sorted(scored, key=lambda item: item[:2])[: retention.keep_best]]


def best_path(records: Sequence[CheckpointRecord], retention: Retention) -> str:
    """The best of `records`, or the last where none has a monitored value; empty for none."""
    chosen = _best(records, retention) or records[-1:]
    return str(chosen[0].path) if chosen else ""


def own_records(listed: Sequence[Listed]) -> list[CheckpointRecord]:
    """What the `Checkpoint` callback wrote; a record that does not say who did counts by its name."""
    records = [entry.record for entry in listed if entry.record is not None and not entry.path.is_symlink()]
    return [
        record
        for record in records
        if record.writer == WRITER
        or (record.writer is None and not record.is_old and is_record_of_callback(record.path))
    ]


def is_named(record: CheckpointRecord, paths: set[str]) -> bool:
    """Whether one of `paths` is the record, its folder, what its hook named, or one of its files."""
    own = [record.path, *(record.path.parent / file.path for file in record.files)]
    return any(str(path) in paths for path in (*own, record.data_path, record.primary_path))


class Kept:
    """The checkpoints of one run that are there, held in memory: no record is read again when one is added."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._records: list[CheckpointRecord] = []
        self._surplus: list[CheckpointRecord] = []
        self._early_scores: dict[int, float] = {}
        """Of steps whose checkpoint is not durable yet, or is none."""

    def begin(self, records: Sequence[CheckpointRecord]) -> None:
        """Training begins, and `records` of its run are there."""
        self._records, self._surplus = [_without_state(record) for record in records], []
        self._early_scores = {}

    def rewind(self, step: int) -> None:
        """The run was put back to `step`, and what came after it is undone."""
        self._records = [record for record in self._records if record.step <= step]
        self._early_scores = {at: value for at, value in self._early_scores.items() if at <= step}

    def add(self, record: CheckpointRecord) -> None:
        """`record` has become durable, maybe in the place of another; it gets the score that came before it."""
        self._records = [old for old in self._records if old.path != record.path]
        self._records.append(_without_state(record))
        if record.step in self._early_scores:
            self._score(len(self._records) - 1, self._early_scores[record.step])
        self._early_scores = {step: value for step, value in self._early_scores.items() if step >= record.step}

    def note_score(self, step: int, value: float) -> None:
        """The monitored score of `step` is known."""
        for index, record in enumerate(self._records):
            if record.step == step:
                self._score(index, value)
        self._early_scores[step] = value  # its checkpoint, or ``final`` of the same step, may be on its way

    def score_of(self, step: int) -> float | None:
        """The monitored score of `step`, where that came already."""
        return self._early_scores.get(step)

    def surplus(self) -> list[CheckpointRecord]:
        """What the run does not keep, oldest first; asked again, also what could not be removed the last time."""
        gone = {record.path for record in self._surplus if not os.path.lexists(record.path)}
        self._records = [record for record in self._records if record.path not in gone]
        self._surplus = to_delete(self._records, self._retention)
        return self._surplus

    def _score(self, index: int, value: float) -> None:
        name, record = self._retention.monitor or "", self._records[index]
        if record.metrics.get(name) == value:
            return  # it was known when the checkpoint was saved
        try:
            add_score(record, name, value)
        except OSError as error:
            log.warning("%s of step %d is not kept: %s", name, record.step, error.strerror or error)
            return
        self._records[index] = replace(record, metrics={**record.metrics, name: value})


def _without_state(record: CheckpointRecord) -> CheckpointRecord:
    """What decides about `record`, without the payload, which may be large."""
    return replace(record, state=None)


def never_queued(uploader: Uploader, record: CheckpointRecord) -> list[CheckpointRecord]:
    """Step checkpoints of the run of `record`, beside and before it, that `uploader` never heard of; oldest first.

    A process may die when a checkpoint is durable and not queued yet, and leave a newer one to go on from. They are
    looked for back to the newest that was queued. Where none was, there are none: a run whose uploads begin only now
    does not send its past.
    """
    found: list[CheckpointRecord] = []
    for older in reversed(own_records(list_checkpoints(record.path.parent))):
        if older.run_id != record.run_id or older.final or older.step > record.step or older.path == record.path:
            continue
        if uploader.has_queued(older.path):
            return found[::-1]
        found.append(older)
    return []
