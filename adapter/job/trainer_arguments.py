"""Names of the arguments of ``lightning.pytorch.Trainer``, and what some of them mean, without importing Lightning.

Importing it takes seconds, and a misspelled name should be reported with the other errors of a job spec.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ENDS_WITH_ITS_PROCESSES", "launches_by_copy", "trainer_arguments"]

ENDS_WITH_ITS_PROCESSES = (
    "the trainer class would be set up in processes that end with training, and what it has learned would be lost to "
    "the one that started them. Use ddp, which starts the script once for each device"
)
"""Why a strategy that spawns or forks the processes that train cannot host a trainer class."""

_STARTS_BY_COPY = re.compile(r"ddp_(spawn|fork|notebook)(_.*)?")


def launches_by_copy(strategy: Any) -> bool:
    """Whether a job's ``strategy`` starts processes by pickling or forking this one: ``ddp_spawn`` and its kin."""
    if isinstance(strategy, Mapping):
        arguments = strategy.get("init_args", strategy.get("dict_kwargs"))
        return isinstance(arguments, Mapping) and arguments.get("start_method") in ("spawn", "fork", "forkserver")
    return isinstance(strategy, str) and _STARTS_BY_COPY.fullmatch(strategy) is not None


@functools.cache
def trainer_arguments() -> tuple[str, ...]:
    """The argument names, read from Lightning's source; empty where it has none."""
    spec = importlib.util.find_spec("lightning")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(folder) / "pytorch" / "trainer" / "trainer.py"
        if source.is_file():
            return _constructor_arguments(ast.parse(source.read_bytes()), "Trainer")
    return ()


def _constructor_arguments(module: ast.Module, class_name: str) -> tuple[str, ...]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = [*method.args.args, *method.args.kwonlyargs]
                    return tuple(argument.arg for argument in given if argument.arg != "self")
    return ()
