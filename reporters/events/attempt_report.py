"""The life of an attempt in its event log: how it begins, what becomes durable in it, and its one end.

`EventLogger` reports a fit of any Trainer this way, `RecordEvents` and the run's outcome a run of a job.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...adapter.contract.exceptions import EventLogError, FailureCategory, StopReason
from ...adapter.plumbing.failures import Failure
from .event_log import EventLog
from .lines import RESUMED_METRIC

__all__ = ["AttemptReport"]

log = logging.getLogger(__name__)


class AttemptReport:
    """Reports one attempt to an open log, which refuses what comes out of turn.

    Attributes:
        event_log: The log.
        last_checkpoint: The checkpoint that was reported last.
    """

    def __init__(self, event_log: EventLog) -> None:
        self.event_log = event_log
        self.last_checkpoint: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the terminal event is written."""
        return self.event_log.phase == "ended"

    def begin(self, metadata: Mapping[str, Any] | None) -> None:
        """Training begins; `metadata` says how the attempt came to be."""
        self.event_log.started(metadata=metadata)

    def resume_from(self, step: int) -> None:
        """Say where the attempt resumed, if that is not the beginning."""
        if step:
            self.event_log.metric(name=RESUMED_METRIC, value=step, step=step)

    def prepare_checkpoint(self) -> None:
        """Bring what waits to the file: who resumes from this checkpoint does not report the steps before it again."""
        self.event_log.flush()

    def checkpoint(self, path: str | Path, step: int) -> None:
        """A checkpoint can no longer be lost."""
        self.event_log.checkpoint(path=path, step=step)
        self.last_checkpoint = str(path)

    def samples(self, paths: Iterable[Path], step: int) -> None:
        """Samples were written."""
        for path in paths:
            self.event_log.sample(path=path, step=step)

    def complete(self, step: int, final_checkpoint: str | Path | None, stopped: str | None = None) -> None:
        """The attempt ended as planned; see `EventLog.completed`."""
        self.event_log.completed(step=step, final_checkpoint=final_checkpoint, stopped=stopped)

    def fail(self, failure: Failure, step: int) -> None:
        """The attempt failed; a log that cannot be written must not hide why, so that this is only logged."""
        self._fail(failure.text, failure.category, step, resumable=failure.resumable)

    def abort(self, why: str, step: int) -> None:
        """The attempt ended without an error that says more; as `fail`."""
        self._fail(why, "train-step", step, resumable=False)

    def _fail(self, text: str, category: FailureCategory | StopReason, step: int, *, resumable: bool) -> None:
        try:
            self.event_log.failed(step=step, error=text, category=category, resumable=resumable)
        except (EventLogError, OSError) as problem:
            log.error("the failure could not be recorded: %s", problem)  # noqa: TRY400
