"""Which callbacks run without being asked for, as data: for the check of a job's ``callbacks`` and for the reference.

Their classes and arguments are put together in `lightning_config`, which loads Lightning; a job is checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..plumbing.text import nearest

__all__ = ["STANDARD_CALLBACKS", "StandardCallback", "fault_of_callbacks"]


class StandardCallback(NamedTuple):
    """One callback of the standard set."""

    purpose: str
    in_job: bool = True
    """Whether it runs in `genlight run`."""
    in_fit: bool = False
    """Whether `genlight fit` adds it."""
    required: bool = False
    """Whether a job cannot leave it out."""


STANDARD_CALLBACKS: Mapping[str, StandardCallback] = {
    "StopRequests": StandardCallback(
        "ends the run on signals, the cancel file and the time limit", in_fit=True, required=True
    ),
    "Evaluate": StandardCallback("calls the class's `evaluate`; with `validate` in the job"),
    "LogMetrics": StandardCallback("logs metrics every `metric_every` steps"),
    "WriteSamples": StandardCallback("writes samples every `sample_every` steps"),
    "JobProgress": StandardCallback("shows progress on the terminal"),
    "Goodput": StandardCallback("measures which share of the time training took"),
    "SystemMonitor": StandardCallback("records the load of CPU, memory and GPU"),
    "WatchNonfinite": StandardCallback("does what `on_nonfinite` says; without `recover` in the job"),
    "Recover": StandardCallback("does what `recover` says; with `recover` in the job"),
    "WatchHangs": StandardCallback("writes the stacks of all threads when no step ends for a long time"),
    "Checkpoint": StandardCallback("saves checkpoints as `checkpoints` says", required=True),
    "ReplicaGuard": StandardCallback("compares the weights of all ranks; on several ranks", in_fit=True, required=True),
    "Heartbeat": StandardCallback("records the throughput regularly", in_job=False),
    "Diagnosis": StandardCallback("looks for faults in losses and gradients", in_job=False),
    "EarlyStopping": StandardCallback("ends training when a score no longer improves", in_job=False),
    "EvaluateCommand": StandardCallback("runs a command for each checkpoint", in_job=False),
}
"""Callbacks that a job may name, by class, in the order in which a job's own run."""

_SET_ELSEWHERE = {"Evaluate": "validate", "Recover": "recover"}
"""Callbacks that a key of their own turns on, which has their arguments too."""


def fault_of_callbacks(chosen: Mapping[str, Any]) -> str:
    """What is wrong with the ``callbacks`` of a job, as a sentence; empty where they can be used."""
    for name, arguments in chosen.items():
        known = STANDARD_CALLBACKS.get(name)
        if known is None:
            return f"There is no callback `{name}`.{nearest(name, STANDARD_CALLBACKS)}"
        if not isinstance(arguments, (bool, dict)):
            return f"`{name}` takes true, false or an object of arguments."
        if name in _SET_ELSEWHERE and arguments is not False:
            return f"`{name}` is set by the key `{_SET_ELSEWHERE[name]}` of the job; give its arguments there."
        if arguments is False and known.required:
            return f"`{name}` cannot be left out, since it {known.purpose}. Give it other arguments."
    return ""
