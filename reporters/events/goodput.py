"""Account of the wall time of a run over all its attempts, from its event log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from .event import RESUMED_METRIC, Checkpoint, Completed, Event, Failed, Metric, Sample, Started
from .reader import Attempts, evaluation_stage, typed_events

METRIC_PREFIX = "time/"
"""Prefix of the metrics of `genlight.callbacks.Goodput`: seconds that an attempt has spent so far."""

PARTS = {
    "steps": "training steps whose work was kept",
    "data_wait": "waiting for data",
    "checkpoint": "waiting for checkpoints",
    "samples": "samples",
    "evaluation": "evaluation",
    "rollout": "rollouts",
    "start_up": "from the start of a process to its first step",
    "ending": "after the last step: final checkpoint",
    "upload_wait": "after the last checkpoint or sample: waiting for uploads, and for the acknowledgement of the end",
    "lost": "steps that were repeated after a kill or a stop, or undone by a roll-back",
    "idle": "between two attempts, and after the last event of an attempt that was killed",
}
"""Meaning of each part, in display order."""


@dataclass(frozen=True)
class Span:
    """The wall time of one attempt.

    Attributes:
        began_s: Start of its process, in seconds since 1970.
        ended_s: Time of its last event.
        resumed_from: The step from which it resumed; 0 if it did not resume.
        last_step: The last step that it reported.
        ended: Whether it has a terminal event.
        seconds: Seconds by part, as in `PARTS`.
    """

    began_s: float
    ended_s: float
    resumed_from: int
    last_step: int
    ended: bool
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Account:
    """The wall time of a run.

    Attributes:
        seconds: Seconds by part, as in `PARTS`; they sum to `wall_s`.
        attempts: Number of attempts that have started.
        wall_s: Seconds from the start of the first process to the last event; if the clock was set back, the sum of the
            parts.
        is_measured: Whether an attempt reported how it spent its time. If none did, ``steps`` has all time except
            ``idle``.
        spans: The attempts, oldest first.
    """

    seconds: Mapping[str, float]
    attempts: int
    wall_s: float
    is_measured: bool
    spans: tuple[Span, ...] = ()

    @property
    def goodput(self) -> float:
        """The share of the wall time spent on steps whose work was kept, from 0 to 1."""
        return self.seconds["steps"] / self.wall_s if self.wall_s > 0 else 0.0


@dataclass
class _Attempt:
    started_s: float
    newest: Event
    is_evaluation: bool = False
    resumed_from: int = 0
    undone_after: int | None = None
    """The last step that still counts after this attempt replaced later ones; None if it replaced none."""
    last_step: int = 0
    upload_wait_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by part, from the newest report of the attempt."""
    reported_at: int = 0
    """The step of that report."""

    @property
    def last_s(self) -> float:
        return self.newest.timestamp_ms / 1000

    @property
    def ended(self) -> bool:
        return isinstance(self.newest, Completed | Failed)

    @property
    def process_began_s(self) -> float:
        return self.started_s - self.seconds.get("start_up", 0.0)


def account_of(path: str | os.PathLike[str]) -> Account | None:
    """Return the account of the event log at `path`; None if no attempt has started.

    If an attempt was killed, the time since its last event counts as ``idle``, because the time of its end is unknown.
    A last line without its newline is skipped, as in `read_events`.

    Raises:
        EventLogError: The file cannot be read, or a line is not a valid event; the message names the line.
    """
    ledger = Ledger()
    for event in typed_events(path):
        ledger.take(event)
    return ledger.account()


class Ledger:
    """Adds up events one by one; `account` can be called at any time."""

    def __init__(self) -> None:
        self._attempts: list[_Attempt] = []
        self._rule = Attempts()

    def take(self, event: Event) -> None:
        """Add the next event of the log."""
        attempts, undone_after = self._attempts, self._rule.take(event)
        if isinstance(event, Started):
            stage = evaluation_stage(event)
            attempts.append(_Attempt(event.timestamp_ms / 1000, event, is_evaluation=stage is not None))
        # A ``failed`` after a terminal event belongs to an attempt that failed before it started.
        elif attempts and not (isinstance(event, Failed) and attempts[-1].ended):
            attempt = attempts[-1]
            if undone_after is not None:
                before = attempt.undone_after
                attempt.undone_after = undone_after if before is None else min(before, undone_after)
            if event.step > attempt.last_step:
                attempt.last_step = event.step
            if isinstance(event, Metric) and event.name.startswith((METRIC_PREFIX, RESUMED_METRIC)):
                _take_metric(attempt, event)
            if isinstance(event, Completed | Failed):
                attempt.upload_wait_s = _upload_wait_s(attempt.newest, event)
            attempt.newest = event

    def account(self) -> Account | None:
        """Return the account of the events so far; None if no attempt has started."""
        attempts = self._attempts
        if not attempts:
            return None
        seconds = dict.fromkeys(PARTS, 0.0)
        spans = []
        for position, attempt in enumerate(attempts):
            following = attempts[position + 1 :]
            undone = [later.undone_after for later in following if later.undone_after is not None]
            kept_until = min(undone, default=attempt.last_step)
            spent = _seconds_by_part(attempt, kept_until)
            began_s, ended_s = attempt.process_began_s, attempt.process_began_s + sum(spent.values())
            spans.append(Span(began_s, ended_s, attempt.resumed_from, attempt.last_step, attempt.ended, spent))
            for part, spent_s in spent.items():
                seconds[part] = seconds.get(part, 0.0) + spent_s
            if following:
                seconds["idle"] += max(following[0].process_began_s - attempt.last_s, 0.0)
        is_measured = any(attempt.seconds for attempt in attempts)
        return Account(seconds, len(attempts), sum(seconds.values()), is_measured, tuple(spans))


def _seconds_by_part(attempt: _Attempt, kept_until: int) -> dict[str, float]:
    """Return the seconds of each part of one attempt; a part is never negative.

    They sum to the time from the start of the process to its last event, unless the clock was set back meanwhile. The
    reported seconds come from a monotonic clock, so they count in full even then.
    """
    spent = {"start_up": 0.0, **attempt.seconds, "upload_wait": attempt.upload_wait_s}
    rest_s = max(attempt.last_s - attempt.process_began_s - sum(spent.values()), 0.0)
    part = (
        "ending" if attempt.ended and attempt.last_step <= max(attempt.reported_at, attempt.resumed_from) else "steps"
    )
    part = "evaluation" if attempt.is_evaluation else part
    spent[part] = spent.get(part, 0.0) + rest_s
    made, undone = attempt.last_step - attempt.resumed_from, attempt.last_step - kept_until
    lost_s = spent.get("steps", 0.0) * min(max(undone, 0) / max(made, 1), 1.0)
    return {**spent, "steps": spent.get("steps", 0.0) - lost_s, "lost": spent.get("lost", 0.0) + lost_s}


def _upload_wait_s(before: Event, terminal: Completed | Failed) -> float:
    """Return the seconds between a checkpoint or sample and the terminal event of its step: the wait for uploads."""
    if not isinstance(before, Checkpoint | Sample) or before.step != terminal.step:
        return 0.0
    return max(terminal.timestamp_ms - before.timestamp_ms, 0) / 1000


def _take_metric(attempt: _Attempt, event: Metric) -> None:
    if event.name == RESUMED_METRIC:
        attempt.resumed_from = attempt.last_step = event.step
    elif event.value is not None:
        attempt.seconds[event.name.removeprefix(METRIC_PREFIX)] = event.value
        attempt.reported_at = event.step
