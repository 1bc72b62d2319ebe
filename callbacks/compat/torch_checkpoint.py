"""Checkpoints of the six-hook style: one ``.pt`` file, whole or absent, that is read without running code.

Written under a temporary name beside its target, loaded again to prove it, then renamed. Only tensors and plain values
go into it, so that ``torch.load(weights_only=True)`` reads all of it, the states of optimizers included.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.durable import fsync_directory, temporary_name
from ...adapter.plumbing.redaction import text_of

__all__ = ["ESSENTIAL", "load_checkpoint", "save_checkpoint"]

ESSENTIAL: Final = ("model_state_dict", "optimizer_state_dict", "global_step")
"""Without these a file is not a checkpoint."""


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> Path:
    """Write a checkpoint of that style; durable when this returns.

    Args:
        path: The file, which is replaced when the new one has been proven.
        checkpoint: ``model_state_dict, optimizer_state_dict, global_step``, and what else belongs to it
            (``best_loss, config, scheduler_state_dict, scaler_state_dict, model_config``). What is neither a tensor nor
            a plain value becomes its text.

    Returns:
        The file.

    Raises:
        CheckpointError: An essential key is missing, or the file could not be written, or not be read again. A file
            that was there is as it was, and no temporary one remains.
    """
    target = Path(path)
    missing = [name for name in ESSENTIAL if name not in checkpoint]
    if missing:
        raise CheckpointError(f"a checkpoint for {target} lacks {', '.join(missing)}")
    temporary = target.with_name(f"{temporary_name(target.stem)}.pt.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            torch.save(_plain(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        _read(temporary)
        os.replace(temporary, target)
        fsync_directory(target.parent)
    except (OSError, RuntimeError) as error:  # torch says in a RuntimeError that a disk is full
        raise CheckpointError(f"the checkpoint {target} could not be written: {text_of(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def load_checkpoint(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> dict[str, Any]:
    """The content of a checkpoint of that style; nothing in it is run.

    Args:
        path: The file.
        map_location: Where tensors go, as in ``torch.load``.

    Raises:
        FileNotFoundError: There is no such file.
        BrokenCheckpointError: It is damaged, holds something else than tensors and plain values, or lacks an essential
            key.
    """
    return _read(Path(path), map_location)


def _read(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        reason = "it holds something else than tensors and plain values, which is not loaded as it could run code"
        raise BrokenCheckpointError(str(path), f"{reason} ({text_of(error).splitlines()[0]})") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise BrokenCheckpointError(str(path), f"it cannot be read: {text_of(error)}") from error
    missing = [name for name in ESSENTIAL if not isinstance(checkpoint, dict) or name not in checkpoint]
    if missing:
        raise BrokenCheckpointError(str(path), f"it lacks {', '.join(missing)}")
    loaded: dict[str, Any] = checkpoint
    return loaded


def _plain(value: Any) -> Any:
    """`value` as ``weights_only`` reads it: tensors and plain values stay, anything else becomes its text."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {key if type(key) in (str, int) else str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in value]
    if isinstance(value, bool | int | float | str):  # a subclass, an enumeration say
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # a number of numpy's
        return value.item()
    return str(value)
