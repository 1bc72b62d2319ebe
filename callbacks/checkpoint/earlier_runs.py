"""Checkpoints that lie in the directory of a run before it trains: whose they are, and what Lightning may ask for.

``Trainer.fit(ckpt_path="last")`` looks for files of ``ModelCheckpoint`` alone, and takes none for a start at step 0, so
`find_ours` makes Lightning find those of `Checkpoint` as well.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from ...adapter.contract.exceptions import CheckpointError
from ..lightning_internals import CheckpointConnector
from .format.layout import is_record_of_callback
from .ownership import is_checkpoint_file
from .retention import own_records
from .selection import list_checkpoints, newest_valid

__all__ = ["find_ours", "in_use_fault", "note_directory"]

_trained_here: set[Path] = set()
"""Directories of checkpoints that trainings of this process write to."""


def note_directory(directory: Path) -> None:
    """Remember that checkpoints in `directory` are this process's own from now on."""
    _trained_here.add(directory)


def in_use_fault(directory: Path) -> str | None:
    """Why a training must not begin at step 0 in `directory`: `Checkpoint` has left something there.

    None where it has not, or where this very process has trained there.
    """
    if directory in _trained_here:
        return None
    listed = [entry for entry in list_checkpoints(directory) if not entry.path.is_symlink()]
    names = [record.path.name for record in own_records(listed)]
    # A broken one may still be somebody's only copy.
    broken = [e.path for e in listed if e.record is None and is_record_of_callback(e.path)]
    names += [path.name for path in broken if is_checkpoint_file(path)]
    if not names:
        return None
    return (
        f"{os.fspath(directory)!r} holds checkpoints of another run, such as {names[-1]}. Go on from them with "
        '`trainer.fit(…, ckpt_path="last")`, choose another `dirpath`, move them away, or have them replaced with '
        "`Checkpoint(replace_existing=True)`."
    )


def find_ours(directories_of: Callable[[Any], list[Path]]) -> None:
    """Have ``ckpt_path="last"`` of Lightning's Trainer look in the directories of `Checkpoint` too; once is enough.

    Args:
        directories_of: The directories of a trainer, empty where it has no such callback.
    """
    original = CheckpointConnector._parse_ckpt_path

    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
        directories = directories_of(self.trainer)  # also tells ``"best"`` where they are
        ours = _newest(directories) if ckpt_path == "last" else None
        if ours is None:
            return original(self, state_fn, ckpt_path, *args, **options)
        if not any(isinstance(c, ModelCheckpoint | OnExceptionCheckpoint) for c in self.trainer.callbacks):
            return ours
        theirs = original(self, state_fn, ckpt_path, *args, **options)
        return theirs if theirs is not None and os.path.getmtime(theirs) > os.path.getmtime(ours) else ours

    CheckpointConnector._parse_ckpt_path = parse  # type: ignore[method-assign]


def _newest(directories: list[Path]) -> str | None:
    """The newest whole checkpoint; None where there are none at all.

    Raises:
        CheckpointError: There are some, and none is whole.
    """
    for directory in directories:
        record, warnings = newest_valid(directory)
        if record is not None:
            return str(record.path)
        if warnings:
            raise CheckpointError(
                f"no checkpoint in {os.fspath(directory)!r} is whole: {'; '.join(warnings)}. Restore one, move them "
                "away, or choose another `dirpath`"
            )
    return None
