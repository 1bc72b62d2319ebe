"""How far an attempt came, for the report of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract.exceptions import FailureCategory

if TYPE_CHECKING:
    from ...reporters.events.event_log import EventLog
    from ..module.module import ContractModule

__all__ = ["Progress"]


@dataclass
class Progress:
    """What an attempt is doing, written by its training and read by whatever reports how it ended."""

    event_log: EventLog | None = None
    """The attempt's log, on rank zero."""
    preparing: FailureCategory = "model-load"
    """What was being prepared last."""
    module: ContractModule | None = None

    @property
    def step(self) -> int:
        """The step at which a failure happened; 0 before the first."""
        return self.module.failed_step if self.module is not None else 0

    @property
    def stage(self) -> FailureCategory:
        """What is going on, for a failure whose type does not tell its category."""
        has_started = self.step > 0 if self.event_log is None else self.event_log.phase != "new"
        return "train-step" if has_started else self.preparing
