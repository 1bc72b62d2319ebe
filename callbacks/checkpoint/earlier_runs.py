"""Checkpoints that lie in the directory of a run before it trains: whose they are, and what Lightning may ask for.

``Trainer.fit(ckpt_path="last")`` looks for files of ``ModelCheckpoint`` alone, and takes none for a start at step 0, so
`find_ours` makes Lightning find those of `Checkpoint` as well.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Protocol

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
    # A broken one may still be the user's only copy.
    broken = [e.path for e in listed if e.record is None and is_record_of_callback(e.path)]
    names += [path.name for path in broken if is_checkpoint_file(path)]
    if not names:
        return None
    return (
        f"{os.fspath(directory)!r} holds checkpoints of another run, such as {names[-1]}. Go on from them with "
        '`trainer.fit(…, ckpt_path="last")`, choose another `dirpath`, move them away, or have them replaced with '
        "`Checkpoint(replace_existing=True)`."
    )


class _KeepsCheckpoints(Protocol):
    def place_under(self, trainer: Any) -> Path: ...


def find_ours(kind: type[_KeepsCheckpoints]) -> None:
    """Have ``ckpt_path="last"`` of Lightning's Trainer look where callbacks of `kind` keep checkpoints; once is enough.

    `kind` is `Checkpoint`, which imports this module.
    """
    original = CheckpointConnector._parse_ckpt_path

    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
        ours = [callback for callback in self.trainer.callbacks if isinstance(callback, kind)]
        directories = [callback.place_under(self.trainer) for callback in ours]  # also tells ``"best"`` where they are
        newest = _newest(directories) if ckpt_path == "last" else None
        if newest is None:
            return original(self, state_fn, ckpt_path, *args, **options)
        if not any(isinstance(c, ModelCheckpoint | OnExceptionCheckpoint) for c in self.trainer.callbacks):
            return newest
        theirs = original(self, state_fn, ckpt_path, *args, **options)
        return theirs if theirs is not None and os.path.getmtime(theirs) > os.path.getmtime(newest) else newest

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
