"""The import path that existing trainer classes use.

They say ``from gen_worker.trainer import StepResult``. Where that package is not installed, `install` makes
``gen_worker.trainer`` and its modules importable; every name in them is the one of `genlight.adapter`, resolved when
it is first asked for, or of `compat.old_names`, which has what only the old package had. The old package spread its
names over its modules differently from release to release, so each module here answers to all of them.

``worldflux.telemetry.wasr`` and ``worldflux.training.callbacks`` are made importable in the same way.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import old_names

__all__ = ["MODULES", "install", "run_training_runtime_from_env"]

MODULES = (
    *("api", "contracts", "loop", "runtime", "orchestrated", "job_lifecycle", "authz", "resolve", "inputs"),
    *("arrow_feed", "model_runtime", "artifacts", "uploader", "reporting", "checkpointing", "helpers"),
    *("helpers.optim", "helpers.repro", "helpers.scalar", "subprocess_contract"),
)
"""Modules of ``gen_worker.trainer``."""

_OWN = ("run_training_runtime_from_env",)
_ADAPTER = "genlight.adapter"
_TRAINER = "gen_worker.trainer"
_SIX_HOOKS = (
    "genlight.callbacks.compat",
    (
        *("Callback", "CallbackList", "CheckpointCallback", "DiagnosisCallback", "EarlyStoppingCallback"),
        *("EvalCallback", "HeartbeatCallback", "LoggingCallback", "ProgressCallback", "TrainingReportCallback"),
    ),
)
_WORLDFLUX = {
    "worldflux.training": _SIX_HOOKS,
    "worldflux.training.callbacks": _SIX_HOOKS,
    "worldflux.telemetry.wasr": (
        "genlight.reporters.telemetry",
        (
            *("OPTIONAL_EVENT_FIELDS", "REQUIRED_EVENT_FIELDS", "default_metrics_path", "make_run_id"),
            *("read_events", "write_event"),
        ),
    ),
}
"""Modules of ``worldflux``: the module of ours that each stands for, and its names."""


def install() -> None:
    """Make ``gen_worker.trainer`` and the modules of ``worldflux`` importable, unless the real packages are there.

    Does nothing the second time.
    """
    if not _is_there(_TRAINER):
        names = sorted({*_genlight().__all__, *_genlight().__contract__, *old_names.__all__, *_OWN})
        for name in (_TRAINER, *(f"{_TRAINER}.{module}" for module in MODULES)):
            _register(name, names, _resolve)
    if not _is_there("worldflux"):
        for name, (own, of_module) in _WORLDFLUX.items():
            _register(name, of_module, functools.partial(_resolve_in, own))


def _is_there(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def _register(name: str, names: Sequence[str], resolve: Callable[[str], Any]) -> None:
    """Make a package importable as `name`, whose `names` are looked up by `resolve` when they are asked for."""

    def attribute(wanted: str) -> Any:
        if wanted not in names:
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        return resolve(wanted)

    module = ModuleType(name, f"Stands in for {name}; every name comes from genlight.")
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    module.__getattr__ = attribute  # type: ignore[method-assign]
    module.__all__ = list(names)  # type: ignore[attr-defined]
    parent, _, last = name.rpartition(".")
    if parent and not _is_there(parent):
        _register(parent, (), resolve)
    sys.modules[name] = module
    if parent:
        setattr(importlib.import_module(parent), last, module)


def _resolve(name: str) -> Any:
    if name in _OWN:  # first: it is also a function of genlight's, which ends differently
        return globals()[name]
    return getattr(old_names if name in old_names.__all__ else _genlight(), name)


def _resolve_in(module_name: str, name: str) -> Any:
    return getattr(importlib.import_module(module_name), name)


def _genlight() -> Any:
    """`genlight.adapter`. By name, here and below: the classes that a run loads import this module, which runs none."""
    return importlib.import_module(_ADAPTER)


def run_training_runtime_from_env() -> int:
    """Run the job that the environment describes; returns 0.

    `genlight.adapter.run_training_runtime_from_env` returns the exit code instead.

    Raises:
        StartupContractError: The run could not start.
        TrainingCanceled: It was told to stop.
        BaseException: Whatever else ended it: the root cause, once everything was reported.
    """
    run = importlib.import_module(f"{_ADAPTER}.run.run")
    code, error = run.attempt_job(run.RunOptions())
    if error is not None:
        raise error
    return int(code)
