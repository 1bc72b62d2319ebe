"""Inputs of a run: what references mean, and how they get to this machine.

The names below are resolved on first use; importing this package imports neither torch nor an HTTP client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .components import SafetensorsLoader, load_components
    from .cozy import HttpResolveClient
    from .materialize import MaterializedInputs, materialize_inputs
    from .progress import InputProgress
    from .refs import parse_ref

_HOME = {
    "HttpResolveClient": ".cozy",
    "InputProgress": ".progress",
    "MaterializedInputs": ".materialize",
    "SafetensorsLoader": ".components",
    "load_components": ".components",
    "materialize_inputs": ".materialize",
    "parse_ref": ".refs",
}

__all__ = [
    "HttpResolveClient",
    "InputProgress",
    "MaterializedInputs",
    "SafetensorsLoader",
    "load_components",
    "materialize_inputs",
    "parse_ref",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
