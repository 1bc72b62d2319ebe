"""The part of an attempt that its callbacks and loggers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ...adapter.plumbing.failures import Failure
    from ...reporters.events.event_log import EventLog
    from ..checkpoint.format.record import RecordMeta
    from ..stop.sources import StopSources

__all__ = ["RunContext", "join_run"]


class RunContext(Protocol):
    """The session of ``genlight run`` or ``genlight fit``, as callbacks see it. Any other fit has none."""

    stop: StopSources
    """Everything that can ask the run to stop."""
    record: RecordMeta | None
    """Metadata of the run for every checkpoint record; None where it is not known beforehand."""
    event_log: EventLog | None
    """The log of this attempt, open, on rank zero; None where an `EventLogger` keeps its own."""

    def first_cause(self, own: Failure) -> Failure:
        """The failure to report where this rank fails: its own, or an earlier one of another rank that caused it."""
        ...

    def end_now(self, error: BaseException) -> NoReturn:
        """Report a failure from a thread that watches the training, and end the process."""
        ...


def join_run(trainer: pl.Trainer, run: RunContext) -> None:
    """Hand `run` to each callback and logger of `trainer` that has a method ``join_run``."""
    for part in [*trainer.callbacks, *trainer.loggers]:  # type: ignore[attr-defined]
        join = getattr(part, "join_run", None)
        if join is not None:
            join(run)
