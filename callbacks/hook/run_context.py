"""What the runtime of a job shares with the callbacks and loggers of its fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ...reporters.events.event_log import EventLog
    from ..checkpoint.format.record import RecordMeta
    from ..stop.sources import StopSources

__all__ = ["RunContext", "join_run"]


@dataclass(frozen=True)
class RunContext:
    """A run of a job, as its callbacks see it. A callback that no job has made works without."""

    stop: StopSources
    """What can ask the run to stop."""
    record: RecordMeta
    """What every checkpoint of the run says of it."""
    end_now: Callable[[Exception], None]
    """Reports a failure from a thread that watches the training, and ends the process."""
    event_log: EventLog | None
    """The log of this attempt, open, on rank zero."""


def join_run(trainer: pl.Trainer, run: RunContext) -> None:
    """Hand `run` to each callback and logger of `trainer` that has a method ``join_run``."""
    for part in [*trainer.callbacks, *trainer.loggers]:  # type: ignore[attr-defined]
        join = getattr(part, "join_run", None)
        if join is not None:
            join(run)
