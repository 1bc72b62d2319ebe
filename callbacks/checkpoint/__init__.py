"""Checkpoints that are whole or absent, and resume to the same bits.

Names are resolved when they are first used (PEP 562): records, verification and listings need neither torch nor
Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commit import stage, sweep
    from .loading import load, load_weights
    from .record import CheckpointRecord, FileEntry, RecordMeta, read_record
    from .saving import save
    from .verification import verify

_HOME = {
    "commit": ("stage", "sweep"),
    "loading": ("load", "load_weights"),
    "record": ("CheckpointRecord", "FileEntry", "RecordMeta", "read_record"),
    "saving": ("save",),
    "verification": ("verify",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CheckpointRecord",
    "FileEntry",
    "RecordMeta",
    "load",
    "load_weights",
    "read_record",
    "save",
    "stage",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
