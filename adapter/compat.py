"""The import path that existing trainer classes use.

They say ``from gen_worker.trainer import StepResult``. Where that package is not installed, `install` makes
``gen_worker.trainer`` and its modules importable; every name in them is the one of `genlight.adapter`, resolved when
it is first asked for, or of `module.old_names`, which has what only the old package had. The old package spread its
names over its modules differently from release to release, so each module here answers to all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .module import old_names

__all__ = ["MODULES", "install", "run_training_runtime_from_env"]

MODULES = (
    "api",
    "contracts",
    "loop",
    "runtime",
    "orchestrated",
    "job_lifecycle",
    "authz",
    "resolve",
    "inputs",
    "arrow_feed",
    "model_runtime",
    "artifacts",
    "uploader",
    "reporting",
    "checkpointing",
    "helpers",
    "helpers.optim",
    "helpers.repro",
    "helpers.scalar",
    "subprocess_contract",
)
"""Modules of ``gen_worker.trainer``."""

_OWN = ("run_training_runtime_from_env",)
_PACKAGE = "gen_worker"
_TRAINER = "gen_worker.trainer"


def install() -> None:
    """Make ``gen_worker.trainer`` importable, unless the real one is; does nothing the second time."""
    if _TRAINER in sys.modules or _is_installed(_TRAINER):
        return
    parent = importlib.import_module(_PACKAGE) if _is_installed(_PACKAGE) else _register(_PACKAGE, None)
    trainer = _register(_TRAINER, parent)
    for name in MODULES:
        folder, _, _ = name.rpartition(".")
        _register(f"{_TRAINER}.{name}", sys.modules[f"{_TRAINER}.{folder}"] if folder else trainer)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def _register(name: str, parent: ModuleType | None) -> ModuleType:
    module = ModuleType(name, f"Stands in for {name}; every name comes from genlight.adapter.")
    is_package = name in (_PACKAGE, _TRAINER) or any(f"{_TRAINER}.{part}".startswith(f"{name}.") for part in MODULES)
    module.__spec__ = ModuleSpec(name, loader=None, is_package=is_package)
    if is_package:
        module.__path__ = []
    if name != _PACKAGE:
        module.__getattr__ = _resolver(name)  # type: ignore[method-assign]
        module.__all__ = list(_names())  # type: ignore[attr-defined]
    sys.modules[name] = module
    if parent is not None:
        setattr(parent, name.rpartition(".")[2], module)
    return module


def _names() -> list[str]:
    return sorted({*_genlight().__all__, *old_names.__all__, *_OWN})


def _resolver(module_name: str) -> Any:
    def resolve(name: str) -> Any:
        if name in _OWN:  # first: it is also a function of genlight's, which ends differently
            return globals()[name]
        if name in old_names.__all__:
            return getattr(old_names, name)
        if name in _names():
            return getattr(_genlight(), name)
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")

    return resolve


def _genlight() -> Any:
    """`genlight.adapter`. By name, here and below: the classes that a run loads import this module, which runs none."""
    return importlib.import_module(__package__)


def run_training_runtime_from_env() -> int:
    """Run the job that the environment describes; returns 0.

    `genlight.adapter.run_training_runtime_from_env` returns the exit code instead.

    Raises:
        StartupContractError: The run could not start.
        TrainingCanceled: It was told to stop.
        BaseException: Whatever else ended it: the root cause, once everything was reported.
    """
    run = importlib.import_module(".run.run", __package__)
    attempt = run.attempt_job(run.RunOptions())
    if attempt.error is not None:
        raise attempt.error
    code: int = attempt.exit_code
    return code
