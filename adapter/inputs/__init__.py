"""Inputs of a run: what references mean, and how they get to this machine.

The names below are resolved on first use; importing this package imports neither torch nor an HTTP client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..helpers.components import SafetensorsLoader, load_components
    from ..job.refs import parse_ref
    from .materialize import MaterializedInputs, materialize_inputs
    from .progress import InputProgress
    from .tensorhub import HttpResolveClient
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "..helpers.components": ("SafetensorsLoader", "load_components"),
            ".tensorhub": ("HttpResolveClient",),
            ".materialize": ("MaterializedInputs", "materialize_inputs"),
            ".progress": ("InputProgress",),
            "..job.refs": ("parse_ref",),
        },
    )

__all__ = [
    "HttpResolveClient",
    "InputProgress",
    "MaterializedInputs",
    "SafetensorsLoader",
    "load_components",
    "materialize_inputs",
    "parse_ref",
]
