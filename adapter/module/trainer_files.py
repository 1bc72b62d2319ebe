"""The files that a trainer's own ``save_checkpoint`` writes and its ``load_checkpoint`` reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...callbacks.checkpoint.format.record import CheckpointRecord, read_record
from ...callbacks.checkpoint.selection import find_checkpoint
from ..contract.exceptions import CheckpointError, ContractError
from .plugin_loading import optional_hook


def check_result(result: Any, output_dir: Path) -> dict[str, Any] | None:
    """Check and return the result of ``save_checkpoint``; paths within `output_dir` become relative to it.

    Raises:
        ContractError: It is not a mapping or None, or its ``primary_path`` does not exist or is outside `output_dir`.
    """
    if result is None:
        return None
    if not isinstance(result, Mapping):
        raise ContractError(f"save_checkpoint returned a {type(result).__qualname__}; it must be a mapping or None")
    paths = {str(name): _make_relative(value, output_dir) for name, value in result.items()}
    named = paths.get("primary_path")
    if named is None or named == "":
        paths.pop("primary_path", None)
        return paths
    _check_primary_path(named, output_dir)
    return paths


def _check_primary_path(named: Any, output_dir: Path) -> None:
    """Raise `ContractError` if `named` is no existing file in `output_dir`."""
    if not isinstance(named, str | os.PathLike):
        raise ContractError(
            f"save_checkpoint returned a primary_path that is a {type(named).__qualname__}; it must be a path"
        )
    path = Path(os.path.normpath(output_dir / named))
    if not path.is_relative_to(output_dir):
        raise ContractError(
            f"save_checkpoint returned the primary_path {os.fspath(named)!r}, which lies outside of its output_dir and "
            "would not be part of the checkpoint; write the file into output_dir"
        )
    if not path.exists():
        raise ContractError(
            f"save_checkpoint returned the primary_path {os.fspath(named)!r}, but its output_dir has no such file; it "
            f"contains {', '.join(sorted(os.listdir(output_dir))) or 'nothing'}"
        )


def _make_relative(value: Any, output_dir: Path) -> Any:
    """Return `value`; an absolute path below `output_dir`, which is renamed later, becomes relative to it."""
    if not isinstance(value, str | os.PathLike) or not os.path.isabs(value):
        return value
    for root in (str(output_dir), os.path.realpath(output_dir)):  # a hook may have resolved the path
        path = Path(os.path.normpath(value))
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return value


def trainer_directory(checkpoint: str | os.PathLike[str] | None, trainer: object) -> Path | None:
    """Return the folder with the files that ``save_checkpoint`` wrote for `checkpoint`; None if there is none.

    Raises:
        CheckpointError: The older runtime wrote the checkpoint, so its weights are only in the trainer's own files; and
            these files are gone, or `trainer` has no ``load_checkpoint`` to read them.
    """
    if checkpoint is None:
        return None
    try:
        found = find_checkpoint(checkpoint)
    except FileNotFoundError:  # it is no checkpoint of genlight; another checkpoint plugin may keep its own anywhere
        return None
    if found.suffix != ".json":
        return None
    record = read_record(found)
    folder = record.trainer_folder
    if record.is_old:
        _check_old_files(record, folder, trainer)
    return folder if folder is not None and folder.is_dir() else None


def _check_old_files(record: CheckpointRecord, folder: Path | None, trainer: object) -> None:
    """Raise `CheckpointError` if the trainer cannot restore a checkpoint of the older runtime from its files."""
    name = type(trainer).__name__
    if folder is None:
        if record.trainer_checkpoint is not None:
            raise CheckpointError(
                f"checkpoint {record.name} cannot be resumed from: save_checkpoint wrote files for it, but there is no "
                f"folder {record.path.with_suffix('')}. Put the files there, or name another checkpoint"
            )
    elif any(folder.iterdir()) and optional_hook(trainer, "load_checkpoint") is None:
        raise CheckpointError(
            f"checkpoint {record.name} cannot be resumed from: {folder} holds files that {name} wrote, and {name} has "
            "no load_checkpoint to read them. Add one; it may do nothing if load_state_dict restores everything"
        )
