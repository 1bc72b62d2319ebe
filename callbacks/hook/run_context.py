"""What an attempt shares with the callbacks and loggers of its fit."""

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
    """What can ask the run to stop."""
    record: RecordMeta | None
    """What every checkpoint of the run says of it; None where that is not known beforehand."""
    event_log: EventLog | None
    """The log of this attempt, open, on rank zero; None where an `EventLogger` keeps its own."""

    def first_cause(self, own: Failure) -> Failure:
        """What to report of a failure of this rank: an earlier one of another rank, of which it failed."""
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
