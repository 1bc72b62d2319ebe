"""When the scheduler takes the machine away, and whether a stop signal is about that."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

__all__ = ["announces_time_limit", "job_end_time_s", "stop_grace_s"]

SIGNAL_MAY_BE_EARLY_S = 60.0
"""Slurm looks at ``--signal`` about once a minute, and rather sends it early."""
WITHOUT_WARNING_S = 30.0
"""How long after the limit itself Slurm waits, as it is delivered (``KillWait``), where no signal was asked for."""


def job_end_time_s(environ: Mapping[str, str] | None = None) -> float | None:
    """When Slurm ends this job, in seconds since 1970; None outside of one, or where it does not say.

    Slurm sets ``SLURM_JOB_END_TIME`` from release 23 on; the script of ``genlight slurm render`` does under older ones.
    """
    return _seconds("SLURM_JOB_END_TIME", environ)


def stop_grace_s(environ: Mapping[str, str] | None = None) -> float | None:
    """How long after its stop signal a process is ended: ``TRAINER_STOP_GRACE_SECONDS``; None where unknown."""
    return _seconds("TRAINER_STOP_GRACE_SECONDS", environ)


def announces_time_limit(ends_at_s: float | None, grace_s: float | None, *, now_s: float | None = None) -> bool:
    """Whether a stop signal that comes now says that the job's time is over; else the machine is wanted for others.

    Args:
        ends_at_s: When the job ends, in seconds since 1970; None means no limit is known.
        grace_s: How long before that the scheduler sends a signal; None where it sends none before.
        now_s: Seconds since 1970; None takes the clock's.
    """
    if ends_at_s is None:
        return False
    left_s = ends_at_s - (time.time() if now_s is None else now_s)
    return left_s <= (WITHOUT_WARNING_S if grace_s is None else grace_s) + SIGNAL_MAY_BE_EARLY_S


def _seconds(name: str, environ: Mapping[str, str] | None) -> float | None:
    text = (os.environ if environ is None else environ).get(name, "").strip()
    return float(text) if text.isascii() and text.isdigit() and int(text) > 0 else None
