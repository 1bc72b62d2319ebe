"""Imports Lightning without the part of SciPy that it never uses.

Lightning imports torchmetrics, and that, where SciPy is installed, imports ``scipy.signal`` and with it 500 modules,
half as many seconds as torch itself takes, to give it back an old name for SRMRpy, a package for audio.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = ["import_lightning", "postponed_scipy_signal"]

_POSTPONED = "scipy.signal"
_OLD_NAME = "hamming"
_WANTS_OLD_NAME = "srmrpy"


def import_lightning() -> None:
    """Import ``lightning.pytorch``; ``scipy.signal`` stays unloaded until somebody uses it."""
    with postponed_scipy_signal():
        importlib.import_module("torchmetrics")
    importlib.import_module("lightning.pytorch")


class _Postponed(ModuleType):
    """Has the name that torchmetrics looks for; whatever else is asked of it comes from the module itself."""

    def __init__(self) -> None:
        super().__init__(_POSTPONED)
        setattr(self, _OLD_NAME, None)

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":  # `inspect` asks every module for it, to find out whose code it looks at
            raise AttributeError(name)
        _give_way(self)
        return getattr(importlib.import_module(_POSTPONED), name)


@contextlib.contextmanager
def postponed_scipy_signal() -> Iterator[None]:
    """Within the block, ``import scipy.signal`` loads nothing before something of it is used."""
    if _POSTPONED in sys.modules or not _is_installed("scipy") or _is_installed(_WANTS_OLD_NAME):
        yield
        return
    sys.modules[_POSTPONED] = stand_in = _Postponed()
    try:
        # A SciPy that does not look its parts up when they are asked for would not show the stand-in.
        if getattr(importlib.import_module("scipy"), "signal", None) is not stand_in:
            _give_way(stand_in)
        yield
    finally:
        _give_way(stand_in)


def _give_way(stand_in: ModuleType) -> None:
    if sys.modules.get(_POSTPONED) is stand_in:
        del sys.modules[_POSTPONED]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
