"""Whether the agent of torchrun that started this rank is still there: without it nobody restarts or ends the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable

from ...contract.exceptions import StopReason

__all__ = ["launcher_check"]


def launcher_check() -> Callable[[], StopReason | None]:
    """A check for `StopSources.add_check`: a rank whose agent was killed saves and ends, and the next start goes on.

    Else it would train on with nobody to see it, and keep a new launcher out of the run's folder.
    """
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def is_gone() -> StopReason | None:
        return "preempted" if agent is not None and os.getppid() != agent else None

    return is_gone
