"""The import paths that existing classes use: `gen_worker.trainer`, and the modules of `worldflux`.

Importing anything of genlight imports this package, which calls `install`. It may import contract and plumbing, and
other parts of genlight only when one of their names is used.

`install` adds a finder to the end of ``sys.meta_path``. Python asks this finder only for modules that it finds nowhere
else, so a real package always wins. Every name of ``gen_worker.trainer`` comes from `genlight.adapter`, or from
`old_names` if only the old package had it. Releases of the old package had the names in different modules, so every
stand-in module has all names.

``gen_worker/trainer.py`` (`gen_worker_trainer.py` here) is a file on the path that imports this package and puts the
stand-in in its own place, so the old import works before anything has imported genlight.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from typing_extensions import override

__all__ = ["MODULES", "install", "run_training_runtime_from_env", "stand_in"]

MODULES = (
    *("api", "contracts", "loop", "runtime", "orchestrated", "job_lifecycle", "authz", "resolve", "inputs"),
    *("arrow_feed", "model_runtime", "artifacts", "uploader", "reporting", "checkpointing", "helpers"),
    *("helpers.optim", "helpers.repro", "helpers.scalar", "subprocess_contract"),
)
"""Modules of ``gen_worker.trainer``."""

_ADAPTER = "genlight.adapter"
_OLD_NAMES = f"{_ADAPTER}.compat.old_names"
_TRAINER = "gen_worker.trainer"
_SIX_HOOKS = (
    "genlight.callbacks.compat",
    (
        *("Callback", "CallbackList", "CheckpointCallback", "DiagnosisCallback", "EarlyStoppingCallback"),
        *("EvalCallback", "HeartbeatCallback", "LoggingCallback", "ProgressCallback", "TrainingReportCallback"),
    ),
)
_WORLDFLUX: Final = {
    "worldflux": ("", ()),
    "worldflux.training": _SIX_HOOKS,
    "worldflux.training.callbacks": _SIX_HOOKS,
    "worldflux.telemetry": ("", ()),
    "worldflux.telemetry.wasr": (
        "genlight.reporters.telemetry",
        (
            *("OPTIONAL_EVENT_FIELDS", "REQUIRED_EVENT_FIELDS", "default_metrics_path", "make_run_id"),
            *("read_events", "write_event"),
        ),
    ),
}
"""By module of ``worldflux``: the module of genlight that provides its names, and these names."""
_GEN_WORKER: Final = {"gen_worker", _TRAINER, *(f"{_TRAINER}.{module}" for module in MODULES)}


class _Finder(MetaPathFinder, Loader):
    """Finds and makes modules that stand in for modules of packages that are not installed."""

    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, last = name.rpartition(".")
        # If a real `worldflux` is installed, none of its modules is replaced or added. To a real `gen_worker`, however,
        # any module of `_GEN_WORKER` that it lacks is added.
        is_ours = name in _WORLDFLUX and (not parent or getattr(sys.modules[parent], "__loader__", None) is self)
        return ModuleSpec(name, self, is_package=True) if is_ours or (last and name in _GEN_WORKER) else None

    @override
    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        names, resolve = _names_of(name)

        def attribute(requested: str) -> Any:
            if (inner := f"{name}.{requested}") in _GEN_WORKER or inner in _WORLDFLUX:
                return importlib.import_module(inner)
            if requested not in names:
                raise AttributeError(f"module {name!r} has no attribute {requested!r}")
            return resolve(requested)

        module.__doc__ = f"Stands in for {name}; every name comes from genlight."
        module.__getattr__ = attribute  # type: ignore[method-assign]
        module.__all__ = list(names)  # type: ignore[attr-defined]


_FINDER: Final = _Finder()


def install() -> None:
    """Make ``gen_worker.trainer`` and the modules of ``worldflux`` importable, unless the real packages are installed.

    Importing anything of genlight does this; a second call does nothing.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def stand_in(name: str) -> ModuleType:
    """Return a module that stands in for `name`."""
    module = importlib.util.module_from_spec(ModuleSpec(name, _FINDER, is_package=True))
    _FINDER.exec_module(module)
    return module


def _names_of(module: str) -> tuple[Sequence[str], Callable[[str], Any]]:
    """Return the names of a module that stands in for another, and the function that looks one up."""
    if module in _WORLDFLUX:
        home, names = _WORLDFLUX[module]
        return names, lambda name: getattr(importlib.import_module(home), name)
    if module == "gen_worker":
        return (), _resolve
    genlight, old_names = importlib.import_module(_ADAPTER), importlib.import_module(_OLD_NAMES)
    own = ("run_training_runtime_from_env",)
    return sorted({*genlight.__all__, *genlight.__contract__, *old_names.__all__, *own}), _resolve


def _resolve(name: str) -> Any:
    """Look up a name of ``gen_worker.trainer``. This imports genlight late, because genlight imports this module."""
    if name == "run_training_runtime_from_env":  # after a failure, genlight's returns an exit code, this one raises
        return run_training_runtime_from_env
    old_names = importlib.import_module(_OLD_NAMES)
    return getattr(old_names if name in old_names.__all__ else importlib.import_module(_ADAPTER), name)


def run_training_runtime_from_env() -> int:
    """Run the job that the environment describes; returns 0.

    `genlight.adapter.run_training_runtime_from_env` returns the exit code instead.

    Raises:
        StartupContractError: The run could not start.
        TrainingCanceled: It was stopped.
        BaseException: Another exception ended the run; it has been reported.
    """
    run = importlib.import_module(f"{_ADAPTER}.run.run")
    code, error = run.attempt_job(run.RunOptions())
    if error is not None:
        raise error
    return int(code)


install()
