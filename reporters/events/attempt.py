"""The rules of one attempt: which event may follow which.

The writer refuses what breaks them, and `validate_events` lists it.
"""

from __future__ import annotations

from typing import Literal

from .event import RESUMED_METRIC, ROLLED_BACK_METRIC, Checkpoint, Completed, Event, Failed, Metric, Started

__all__ = ["Attempt", "Fault", "Phase"]

Phase = Literal["new", "started", "ended"]
Fault = tuple[str, str]
"""The name of a broken rule, as `Violation` has it, and the reason in words."""


class Attempt:
    """How far an attempt is. Not thread-safe.

    Attributes:
        run_id: Whose attempt it is.
        phase: ``new`` before ``started``, ``ended`` once the terminal event is there.
        checkpointed: Steps of which a checkpoint was reported, and that take no further metric.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.phase: Phase = "new"
        self.checkpointed: set[int] = set()
        self._has_resumed = False

    def fault(self, event: Event) -> Fault | None:
        """The rule that `event` would break as the next one of this attempt; None where it may come."""
        if self.phase == "ended":
            return "terminal", "the attempt already has its terminal event"
        if isinstance(event, Started):
            return None if self.phase == "new" else ("started", "the attempt has already started")
        if self.phase == "new":
            return None if isinstance(event, Failed) else ("started", "the attempt has not started")
        if event.run_id != self.run_id:
            return "run_id", f"expected {self.run_id!r} of this attempt, found {event.run_id!r}"
        return self.metric_fault(event.name, event.value, event.step) if isinstance(event, Metric) else None

    def metric_fault(self, name: str, value: float | str | None, step: int) -> Fault | None:
        """As `fault`, for a metric of an attempt that has started."""
        if step in self.checkpointed:
            return "order", (
                f"metric {name!r} of step {step} comes after a checkpoint of that step; "
                "report the metrics of a step before its checkpoint"
            )
        if name == RESUMED_METRIC and (self._has_resumed or value != step):
            return "resumed", f"{name!r} comes once in an attempt and its value is its step; got {value} at step {step}"
        if name == ROLLED_BACK_METRIC and not (isinstance(value, float | int) and 0 <= value <= step):
            return "rolled_back", (
                f"{name!r} has a step as its value that is not after its own; got {value} at step {step}"
            )
        return None

    def take(self, event: Event) -> None:
        """Go on to after `event`, which has no fault."""
        if isinstance(event, Started):
            self.phase = "started"
        elif isinstance(event, Completed | Failed):
            self.phase = "ended"
        elif isinstance(event, Checkpoint):
            self.checkpointed.add(event.step)
        elif isinstance(event, Metric):
            self.take_metric(event.name, event.value)

    def take_metric(self, name: str, value: float | str | None) -> None:
        """As `take`, for a metric."""
        if name == RESUMED_METRIC:
            self._has_resumed = True
        elif name == ROLLED_BACK_METRIC and isinstance(value, float | int):
            self.checkpointed = {step for step in self.checkpointed if step <= value}
