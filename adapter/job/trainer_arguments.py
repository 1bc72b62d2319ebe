"""Names of the arguments of ``lightning.pytorch.Trainer``, without importing Lightning.

Importing it takes seconds, and a misspelled name should be told with the other faults of a job spec.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

__all__ = ["trainer_arguments"]


@functools.cache
def trainer_arguments() -> tuple[str, ...]:
    """The argument names, read from Lightning's source; empty where that cannot be told."""
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
