"""The rules of one attempt: which event may follow which."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ...adapter.contract.exceptions import EventLogError
from .lines import RESUMED_METRIC, ROLLED_BACK_METRIC
from .reader import count_started

__all__ = ["Attempt", "Phase", "check_run_id"]

Phase = Literal["new", "started", "ended"]


class Attempt:
    """How far an attempt is, and what its log may take next. Not thread-safe.

    Attributes:
        number: From 1: one more than the ``started`` lines of the run that the file holds.
        phase: ``new`` before ``started``, ``ended`` once the terminal event is written.
        checkpointed: Steps of which a checkpoint was reported, and that take no further metric.

    Args:
        path: The file of the log.
        run_id: Whose attempt it is.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.number = 1 + count_started(path, run_id)
        self.phase: Phase = "new"
        self.checkpointed: set[int] = set()
        self._path = path
        self._has_resumed = False

    def require(self, event: str, *phases: Phase) -> None:
        """Raise `EventLogError` unless the attempt is in one of `phases`."""
        if self.phase not in phases:
            raise self.refusal(event, self.phase)

    def too_late(self, names: Iterable[str], step: int) -> EventLogError:
        """The error for metrics of a step whose checkpoint was reported before."""
        return EventLogError(
            f"metric {', '.join(names)!r} of step {step} comes after a checkpoint of that step in {self._path}; "
            "report the metrics of a step before its checkpoint"
        )

    def note_resume(self, value: float | str, step: int) -> None:
        """Take the metric that says where the attempt resumed; raise `EventLogError` if it is wrong or comes twice."""
        if self._has_resumed or value != step:
            raise EventLogError(
                f"metric {RESUMED_METRIC!r} comes once in an attempt and its value is its step; "
                f"got {value} at step {step} in {self._path}"
            )
        self._has_resumed = True

    def note_roll_back(self, value: float | str, step: int) -> None:
        """Take the metric that says to which step the run goes back; raise `EventLogError` if that is not behind it."""
        if not isinstance(value, float | int) or not 0 <= value <= step:
            raise EventLogError(
                f"metric {ROLLED_BACK_METRIC!r} has a step as its value that is not after its own; got {value} at step "
                f"{step} in {self._path}"
            )
        self.checkpointed = {each for each in self.checkpointed if each <= value}

    def refusal(self, event: str, state: Phase | Literal["closed"]) -> EventLogError:
        """The error that says why `event` cannot be written."""
        why = {
            "closed": f"the log is closed in process {os.getpid()}",
            "new": "the attempt has not started",
            "started": "the attempt has already started",
            "ended": "the attempt already has its terminal event",
        }[state]
        return EventLogError(f"cannot write {event!r} to {self._path}: {why}")


def check_run_id(run_id: Any) -> None:
    """Raise unless `run_id` can be written.

    Raises:
        TypeError: It is not a string.
        ValueError: UTF-8 cannot hold it.
    """
    if not isinstance(run_id, str):
        raise TypeError(f"Invalid `run_id`. Expected a string, but received {run_id!r}.")
    try:
        run_id.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Invalid `run_id`. Expected a string that UTF-8 can hold, but received {run_id!r}."
        ) from error
