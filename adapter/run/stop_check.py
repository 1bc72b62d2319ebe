"""Whether a run is to stop, before there are callbacks that watch, as while its inputs are fetched."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import Deadline, cancel_file_is_set
from ..contract.exceptions import TrainingCanceled
from ..job.config import RunConfig

if TYPE_CHECKING:
    from ..contract.run_state import RunState

__all__ = ["StopCheck"]


class StopCheck:
    """The sources of a stop of one attempt: signals, the job's flag and cancel file, its time limit, and others.

    Args:
        config: The run.
        signals: Those of this process.
    """

    def __init__(self, config: RunConfig, signals: StopSignals) -> None:
        self.signals = signals
        self.others: list[Callable[[], str | None]] = []
        """Further sources; each returns a reason, or None."""
        self.state: RunState | None = None
        """The run state in which the ranks agree on a stop, once there is one."""
        self._config = config
        self._deadline = Deadline(config.max_runtime_s)

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks stop together, so that none has to be told."""
        return self.state is not None and self.state.stop_reason is not None

    def is_stopping(self) -> bool:
        """Whether this rank or another one was told to stop."""
        try:
            self.raise_if_stopped()
        except TrainingCanceled:
            return True
        return self.is_agreed

    def raise_if_signalled(self) -> None:
        """Raise `TrainingCanceled` if a stop signal has come."""
        if self.signals.reason is not None:
            raise TrainingCanceled(self.signals.reason)

    def raise_if_stopped(self) -> None:
        """Raise `TrainingCanceled` if any source asks for a stop."""
        self.raise_if_signalled()
        config = self._config
        if config.canceled or (config.cancel_file is not None and cancel_file_is_set(config.cancel_file)):
            raise TrainingCanceled("canceled")
        if self._deadline.is_over(time.monotonic()):
            raise TrainingCanceled("timeout")
        for check in self.others:
            reason = check()
            if reason is not None:
                raise TrainingCanceled(reason)
