"""Attempts in an event log: which of them train, and which earlier steps each one takes back.

Every reader of a log follows this one rule, so that tables, curves and the account of time agree.
"""

from __future__ import annotations

import math

from .event import RESUMED_METRIC, ROLLED_BACK_METRIC, Completed, Event, Failed, Metric, Started


def evaluation_stage(started: Started) -> str | None:
    """Return ``validate``, ``test`` or ``predict`` if that is all the attempt does; None if it trains."""
    metadata = started.metadata
    return metadata.get("stage") if isinstance(metadata, dict) else None


class Attempts:
    """Follows the events of one run and says which earlier steps no longer count.

    Once an attempt reports a step after the one from which it resumed, it replaces the steps that earlier attempts made
    after that point. So an attempt that only evaluates, or that ends before its first step, replaces nothing.
    """

    def __init__(self) -> None:
        self._resumed_from: int | None = None
        """The step to go back to as soon as the attempt trains; None after that, and if the attempt only evaluates."""

    def take(self, event: Event) -> int | None:
        """Take the next event; return the step after which everything before the event is undone, or None."""
        if isinstance(event, Started):
            self._resumed_from = 0 if evaluation_stage(event) is None else None
        elif isinstance(event, Metric) and event.name == RESUMED_METRIC:
            self._resumed_from = event.step
        elif isinstance(event, Metric) and event.name == ROLLED_BACK_METRIC:
            return int(event.number) if math.isfinite(event.number) else None
        elif (
            self._resumed_from is not None
            and event.step > self._resumed_from
            and not isinstance(event, Completed | Failed)  # a failure names the step that did not complete
        ):
            step, self._resumed_from = self._resumed_from, None
            return step
        return None
