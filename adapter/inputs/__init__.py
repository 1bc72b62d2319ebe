"""Inputs of a run: what references mean, and how they get to this machine.

The names below are resolved on first use; importing this package imports neither torch nor an HTTP client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .components import load_components as load_components
    from .materialize import MaterializedInputs as MaterializedInputs, materialize_inputs as materialize_inputs
    from .refs import parse_ref as parse_ref
    from .tensorhub import HttpResolveClient as HttpResolveClient
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
