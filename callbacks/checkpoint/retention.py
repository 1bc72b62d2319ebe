"""Which checkpoints a run keeps. The module imports neither torch nor Lightning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .format.layout import is_record_of_callback
from .format.record import CheckpointRecord
from .selection import Listed

__all__ = ["WRITER", "Retention", "best", "best_path", "is_named", "own_records", "to_delete"]

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
    keep_every: int = 0
    """Checkpoints whose step is a multiple; 0 means none for that reason."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"Invalid `keep_last`. Expected a number >= 1, but received {self.keep_last}.")
        for name in ("keep_best", "keep_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid `{name}`. Expected a number >= 0, but received {getattr(self, name)}.")
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
    keep |= {record.path for record in best(steps, retention)}
    keep |= {r.path for r in steps if retention.keep_every and r.step and r.step % retention.keep_every == 0}
    return [record for record in steps if record.path not in keep]


def best(records: Sequence[CheckpointRecord], retention: Retention) -> list[CheckpointRecord]:
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
    chosen = best(records, retention) or records[-1:]
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
