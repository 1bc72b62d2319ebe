"""Earlier attempts of a run, read from its event log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...reporters.events.event import RESUMED_METRIC, STOP_REASONS, Completed, Failed, Metric, Started
from ...reporters.events.reader import typed_events
from ..contract.exceptions import EventLogError


@dataclass
class Attempt:
    """One attempt of a run."""

    resumed_from: int = 0
    """Step of the checkpoint from which it continued; 0 if there was none, or if it ended before it chose one."""
    end: Completed | Failed | None = None
    """Its terminal event; None while it runs, and if it was killed."""

    def is_stopped_at_its_start(self) -> bool:
        """Whether it was stopped before it had trained a step."""
        end = self.end
        return isinstance(end, Failed) and end.category in STOP_REASONS and end.step in (0, self.resumed_from)


def last_attempts(path: Path, run_id: str) -> tuple[Attempt, Attempt]:
    """Return the last two attempts of a run, the older one first. An attempt that does not exist is empty."""
    before, last = Attempt(), Attempt()
    try:
        for event in typed_events(path, strict=False):
            if event.run_id != run_id:
                continue
            if isinstance(event, Started) or (isinstance(event, Failed) and last.end is not None):
                before, last = last, Attempt()
            if isinstance(event, Completed | Failed):
                last.end = event
            elif isinstance(event, Metric) and event.name == RESUMED_METRIC:
                last.resumed_from = event.step
    except EventLogError:
        return Attempt(), Attempt()
    return before, last


def has_trained(path: Path) -> bool:
    """Return whether the log has a trained step or a completed run."""
    try:
        return any(
            isinstance(event, Completed) or (not isinstance(event, Started) and event.step > 0)
            for event in typed_events(path, strict=False)
        )
    except EventLogError:
        return False
