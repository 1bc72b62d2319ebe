"""The standard callbacks as data, for the check of a job's ``callbacks`` and for the reference.

`lightning_objects` makes them. A job is checked here, without loading Lightning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ..plumbing.text import nearest
from .spec import Settings


class StandardCallback(NamedTuple):
    """One callback of the standard set."""

    purpose: str
    arguments: Callable[[Settings], dict[str, Any] | None] | None = None
    """Returns its arguments in `genlight run`, or None if the job does not need it. Without this, `genlight run` adds
    the callback only if the job names it."""
    in_fit: bool = False
    """Whether it runs in `genlight fit` by default, because `ContractModule` adds it."""
    required: bool = False
    """Whether a job cannot remove it."""


def _stops(job: Settings) -> dict[str, Any]:
    limit = job.max_runtime_seconds or None
    return {"cancel_file": job.cancel_file_path, "max_runtime_s": limit, "canceled": job.canceled}


def _samples(job: Settings) -> dict[str, Any]:
    requests = [msgspec.to_builtins(each) for each in job.sample_prompts]
    cadence = {"every_n_steps": job.sample_every, "seed": job.sample_seed}
    return {"directory": job.samples_dir, "requests": requests, **cadence}


def _nonfinite(job: Settings) -> dict[str, Any] | None:
    if job.on_nonfinite == "skip" or (job.on_nonfinite == "warn" and job.callbacks.get("Recover", False)):
        return None  # `Recover` reports them itself
    return {"policy": job.on_nonfinite, "every_n_steps": job.metric_every or 50}


def _recovery(job: Settings) -> dict[str, Any] | None:
    # One good update ends an incident. After 100 skipped updates in a row the run fails.
    return {"ladder": ["skip"], "good_steps": 1, "max_attempts": 100} if job.on_nonfinite == "skip" else None


def _checkpoints(job: Settings) -> dict[str, Any]:
    keep_last = job.checkpoints.keep_last or None
    saves = {**msgspec.to_builtins(job.checkpoints), "keep_last": keep_last}
    proves = {"on_difference": job.resume.on_difference, "overlap": job.resume.overlap}
    return {"dirpath": job.checkpoints_dir, **saves, **proves}


STANDARD_CALLBACKS: Mapping[str, StandardCallback] = {
    "StopRequests": StandardCallback(
        "ends the run on signals, the cancel file and the time limit", _stops, in_fit=True, required=True
    ),
    "Evaluate": StandardCallback(
        "calls the class's `evaluate`; with `validate` in the job",
        lambda job: msgspec.to_builtins(job.validate) if job.validate else None,
    ),
    "LogMetrics": StandardCallback(
        "logs metrics every `metric_every` steps", lambda job: {"every_n_steps": job.metric_every}, in_fit=True
    ),
    "WriteSamples": StandardCallback("writes samples every `sample_every` steps", _samples),
    "JobProgress": StandardCallback("shows progress on the terminal", lambda _: {}, in_fit=True),
    "Goodput": StandardCallback("measures which share of the time training took", lambda _: {}),
    "SystemMonitor": StandardCallback("records the load of CPU, memory and GPU", lambda _: {}),
    "TrainJobStatus": StandardCallback(
        "sends the progress of a Kubeflow TrainJob to its controller",
        lambda _: {} if os.environ.get("KUBEFLOW_TRAINER_SERVER_URL") else None,
    ),
    "WatchNonfinite": StandardCallback("warns or stops as `on_nonfinite` says", _nonfinite),
    "Recover": StandardCallback(
        "skips faulty updates with `on_nonfinite: skip`; lowers the rate and rolls back as its `ladder` says", _recovery
    ),
    "WatchHangs": StandardCallback(
        "writes the stacks of all threads when no step ends for a long time",
        lambda job: {"directory": job.artifacts_dir / "hangs"},
    ),
    "Checkpoint": StandardCallback("saves checkpoints as `checkpoints` says", _checkpoints, required=True),
    "ReplicaGuard": StandardCallback("compares the weights of all ranks; on several ranks", in_fit=True, required=True),
    "Heartbeat": StandardCallback("records the throughput regularly"),
    "ProfileSteps": StandardCallback("writes a trace of the steps from `first` to `last` by torch's profiler"),
    "Diagnosis": StandardCallback("looks for faults in losses and gradients"),
    "EarlyStopping": StandardCallback("ends training when a score no longer improves"),
    "EvaluateCommand": StandardCallback("runs a command for each checkpoint"),
}
"""Callbacks that a job may name, by class, in the order in which they run."""


def callbacks_of_job(job: Settings) -> dict[str, dict[str, Any]]:
    """Return the callbacks of a job with their arguments: the standard ones, changed by its `callbacks`, and others."""
    given = ((name, each.arguments(job)) for name, each in STANDARD_CALLBACKS.items() if each.arguments is not None)
    chosen = {name: arguments for name, arguments in given if arguments is not None}
    for name, change in job.callbacks.items():
        if change is False:
            chosen.pop(name, None)
        else:
            chosen[name] = {**chosen.get(name, {}), **(change if isinstance(change, dict) else {})}
    return {name: chosen[name] for name in STANDARD_CALLBACKS if name in chosen}


def faults_of_callbacks(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield the errors in the ``callbacks`` of a job, each as a sentence."""
    for name, arguments in chosen.items():
        if (known := STANDARD_CALLBACKS.get(name)) is None:
            yield f"There is no callback `{name}`.{nearest(name, STANDARD_CALLBACKS)}"
        elif not isinstance(arguments, (bool, dict)):
            yield f"`{name}` takes true, false or an object of arguments."
        elif name == "Evaluate" and arguments is not False:
            yield "`Evaluate` is set by the key `validate` of the job; give its arguments there."
        elif arguments is False and known.required:
            yield f"`{name}` cannot be removed, because it {known.purpose}. Give it other arguments."
