"""Public names of a package, each imported when it is first used (PEP 562).

A package's ``__init__`` imports its names under ``if TYPE_CHECKING:``, each as itself (``Name as Name``, which exports
it), and hands them out with::

    else:
        __getattr__, __dir__, __all__ = lazy_exports(__name__)

These imports are read here, so that they are the one list of names, for type checkers and when running. In the
``else``, because a type checker that sees a module's ``__getattr__`` takes every misspelled name for a good one.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, unlisted: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of `package`, whose ``__version__`` is that of what is installed.

    Args:
        package: Its ``__name__``.
        unlisted: Names that can be had, but are not shown as public ones.
    """
    home = dict(_imports_for_type_checkers(package))
    listed = sorted(home.keys() - set(unlisted))

    def get_attribute(name: str) -> Any:
        if name == "__version__":
            return version("genlight")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *listed, "__version__"})  # not what the package itself needs, such as `lazy_exports`

    return get_attribute, list_names, listed


def _imports_for_type_checkers(package: str) -> Iterator[tuple[str, str]]:
    """Each name that `package` imports under ``if TYPE_CHECKING:``, with the module that has it."""
    source = inspect.getsource(sys.modules[package])
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for imported in block.body:
                assert isinstance(imported, ast.ImportFrom)
                module = "." * imported.level + (imported.module or "")
                yield from ((name.name, module) for name in imported.names)
