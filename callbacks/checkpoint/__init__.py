"""Checkpoints that are whole or absent, and resume to the same bits.

Names are resolved when they are first used (PEP 562): records, verification and listings need neither torch nor
Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, WritesTrainerFiles
    from .checkpoint_io import DurableCheckpointIO, SaveRequest
    from .commit import Staging, delete_checkpoint, require_space, stage, sweep
    from .loading import load, load_weights
    from .record import CheckpointRecord, FileEntry, RecordMeta, read_record
    from .retention import Retention
    from .rng import capture_rng, restore_rng
    from .saving import save
    from .selection import Listed, find_final, list_checkpoints, newest_valid
    from .verification import verify

_HOME = {
    "checkpoint": ("Checkpoint", "WritesTrainerFiles"),
    "checkpoint_io": ("DurableCheckpointIO", "SaveRequest"),
    "commit": ("Staging", "delete_checkpoint", "require_space", "stage", "sweep"),
    "loading": ("load", "load_weights"),
    "record": ("CheckpointRecord", "FileEntry", "RecordMeta", "read_record"),
    "retention": ("Retention",),
    "rng": ("capture_rng", "restore_rng"),
    "saving": ("save",),
    "selection": ("Listed", "find_final", "list_checkpoints", "newest_valid"),
    "verification": ("verify",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Checkpoint",
    "CheckpointRecord",
    "DurableCheckpointIO",
    "FileEntry",
    "Listed",
    "RecordMeta",
    "Retention",
    "SaveRequest",
    "Staging",
    "WritesTrainerFiles",
    "capture_rng",
    "delete_checkpoint",
    "find_final",
    "list_checkpoints",
    "load",
    "load_weights",
    "newest_valid",
    "read_record",
    "require_space",
    "restore_rng",
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
