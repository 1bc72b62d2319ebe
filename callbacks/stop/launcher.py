"""The launcher of this process, Slurm or torchrun: when it ends the job, and how long it waits before SIGKILL."""

from __future__ import annotations

import os

SIGNAL_MAY_BE_EARLY_S = 60.0
"""Slurm checks ``--signal`` about once a minute, so the signal may come this many seconds early."""
WITHOUT_WARNING_S = 30.0
"""Default of Slurm's ``KillWait``: seconds from SIGTERM at the time limit to SIGKILL, if the job requests no signal."""
TORCHRUN_GRACE_S = 30
"""torchrun's default time between a stop signal and SIGKILL for its ranks."""


def job_end_time_s() -> float | None:
    """Return the time at which Slurm ends this job, in seconds since 1970; None outside of a job or if unknown.

    Slurm sets ``SLURM_JOB_END_TIME`` from release 23 on. For older releases the script of ``genlight slurm`` sets it.
    """
    return _seconds("SLURM_JOB_END_TIME")


def launcher_grace_s() -> float | None:
    """Return the seconds between a stop signal and SIGKILL by this process's launcher; None if unknown.

    A rank can read only torchrun's environment variable, not its ``--shutdown-timeout``. Without the variable, it
    assumes torchrun's default.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return _seconds("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or TORCHRUN_GRACE_S


def announces_time_limit(now_s: float) -> bool:
    """Return whether a stop signal at `now_s` means that the job's time is over; otherwise it is a preemption.

    ``TRAINER_STOP_GRACE_SECONDS`` says how many seconds before the end the scheduler sends the signal. Without it, the
    job has requested no early signal, and `WITHOUT_WARNING_S` applies.

    Args:
        now_s: Seconds since 1970.
    """
    ends_at_s, grace_s = job_end_time_s(), _seconds("TRAINER_STOP_GRACE_SECONDS")
    before_s = (WITHOUT_WARNING_S if grace_s is None else grace_s) + SIGNAL_MAY_BE_EARLY_S
    return ends_at_s is not None and ends_at_s - now_s <= before_s


def _seconds(name: str) -> float | None:
    text = os.environ.get(name, "").strip()
    return float(text) if text.isascii() and text.isdigit() and int(text) > 0 else None
