"""What a ``ModelCheckpoint`` of Lightning saved: where it is, and that it can no longer be lost."""

from __future__ import annotations

import os

from lightning.pytorch.callbacks import ModelCheckpoint

from ...adapter.plumbing.durable import fsync_directory

__all__ = ["make_durable", "saved_path"]


def saved_path(callback: ModelCheckpoint) -> str:
    """What the callback wrote last; Lightning has no public name for it."""
    saved = getattr(callback, "_last_checkpoint_saved", None) or callback.last_model_path or callback.best_model_path
    return str(saved)


def make_durable(path: str) -> bool:
    """Bring a checkpoint (a file, or a folder of them) to the disk, as Lightning does not; False when it is gone."""
    if not os.path.exists(path):
        return False
    if os.path.isfile(path):
        _fsync(path)
    for folder, _, files in os.walk(path):
        for name in files:
            _fsync(os.path.join(folder, name))
        fsync_directory(folder)
    fsync_directory(os.path.dirname(os.path.abspath(path)))
    return True


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
