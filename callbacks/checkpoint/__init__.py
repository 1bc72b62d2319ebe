"""Checkpoints that are whole or absent, and resume to the same bits.

Names are resolved when they are first used (PEP 562): records, verification and listings need neither torch nor
Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...adapter.plumbing.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .checkpoint_io import DurableCheckpointIO, SaveRequest
    from .format.record import CheckpointRecord, FileEntry, RecordMeta, read_record
    from .format.verification import verify
    from .loading import load, load_weights
    from .rank_state import capture_rng, restore_rng
    from .retention import Retention
    from .saving import save
    from .selection import Listed, find_checkpoint, find_final, list_checkpoints, newest_valid
    from .storage.commit import Staging, delete_checkpoint, require_space, stage, sweep
    from .trainer_files import WritesTrainerFiles
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".checkpoint": ("Checkpoint",),
            ".checkpoint_io": ("DurableCheckpointIO", "SaveRequest"),
            ".storage.commit": ("Staging", "delete_checkpoint", "require_space", "stage", "sweep"),
            ".loading": ("load", "load_weights"),
            ".format.record": ("CheckpointRecord", "FileEntry", "RecordMeta", "read_record"),
            ".retention": ("Retention",),
            ".rank_state": ("capture_rng", "restore_rng"),
            ".saving": ("save",),
            ".selection": ("Listed", "find_checkpoint", "find_final", "list_checkpoints", "newest_valid"),
            ".format.verification": ("verify",),
            ".trainer_files": ("WritesTrainerFiles",),
        },
    )

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
    "find_checkpoint",
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
