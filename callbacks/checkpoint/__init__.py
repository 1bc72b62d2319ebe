"""Checkpoints that are complete or absent, and resume to the same bits.

`policy` has the `Checkpoint` callback, which decides when to save; `budget` is its clock, and `plugins` its place in
Lightning. `store` saves and loads: `capture`, `frozen` and `writing` take a state apart and write it; `contents` and
`loading` read it. `storage` commits and removes the files, `listing` finds them, `selection` chooses which to keep and
load, and `export` writes them for other tools. `memory_tier` and `peers` have the checkpoints in memory. `rank_state`
has the state that differs between ranks; `loader_position`, `positioned_loader` and `sampler_order` continue within an
epoch. `format` is the format on disk, `codec` encodes state as JSON and tensors, and `sharded` handles slices.

May import `hook`, `witness`, the modules of `callbacks` itself, the reporters and everything that these may import.

Names are resolved on first use (PEP 562): records, verification and listings need neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...adapter.plumbing.imports import lazy_exports

if TYPE_CHECKING:
    from .format.record import (
        CheckpointRecord as CheckpointRecord,
        RecordMeta as RecordMeta,
        read_record as read_record,
    )
    from .listing import Listed as Listed, list_checkpoints as list_checkpoints
    from .loading import load as load, load_weights as load_weights
    from .plugins import DurableCheckpointIO as DurableCheckpointIO
    from .policy import Checkpoint as Checkpoint, WritesTrainerFiles as WritesTrainerFiles
    from .selection import (
        Retention as Retention,
        find_checkpoint as find_checkpoint,
        find_final as find_final,
        newest_valid as newest_valid,
    )
    from .storage import delete_checkpoint as delete_checkpoint, sweep as sweep, verify as verify
    from .store import CheckpointStore as CheckpointStore, save as save
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
