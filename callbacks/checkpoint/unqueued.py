"""Checkpoints that a kill kept from being queued for upload.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .format.record import CheckpointRecord
from .retention import own_records
from .selection import list_checkpoints

if TYPE_CHECKING:
    from ...reporters.uploads import Uploader

__all__ = ["never_queued"]


def never_queued(uploader: Uploader, record: CheckpointRecord) -> list[CheckpointRecord]:
    """Step checkpoints of the run of `record`, beside and before it, that `uploader` never heard of; oldest first.

    A process may die when a checkpoint is durable and not queued yet, and leave a newer one to go on from. They are
    looked for back to the newest that was queued. Where none was, there are none: a run whose uploads begin only now
    does not send its past.
    """
    found: list[CheckpointRecord] = []
    for older in reversed(own_records(list_checkpoints(record.path.parent))):
        if older.run_id != record.run_id or older.final or older.step > record.step or older.path == record.path:
            continue
        if uploader.has_queued(older.path):
            return found[::-1]
        found.append(older)
    return []
