"""The paths that Lightning gives its checkpoint plugin, and what may lie there beside records."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from ...adapter.contract.exceptions import CheckpointError
from . import remote
from .format.ckpt_file import CKPT_FILE_START, is_torch_file
from .format.record_file import read_record
from .loading import MapLocation
from .ownership import is_stock_sharded
from .storage.commit import delete_checkpoint

__all__ = ["is_file_of_torch", "load_torch_file", "local_path", "remove_at", "warn_of_nonfinite"]

log = logging.getLogger(__name__)


def load_torch_file(path: Path, map_location: MapLocation = None) -> dict[str, Any]:
    """What ``torch.save`` wrote to `path`, without a pickle that could run code."""
    location = "cpu" if map_location is None else map_location
    loaded: dict[str, Any] = torch.load(path, map_location=location, weights_only=True)
    return loaded


@rank_zero_only
def warn_of_nonfinite(path: Path) -> None:
    """Say on rank zero that the weights of the checkpoint at `path` are not finite, where its record does."""
    if not is_file_of_torch(path) and read_record(path).finite_weights is False:
        log.warning(
            "The weights in %s are not finite: training that continues from them is lost. Name an earlier checkpoint; "
            "`genlight checkpoints verify` says which are finite",
            path,
        )


def remove_at(path: Path) -> None:
    """Remove the checkpoint at `path`; what is not one stays, with a warning."""
    if is_stock_sharded(path) and not path.is_symlink():
        shutil.rmtree(path)
        return
    try:
        delete_checkpoint(path)
    except CheckpointError as error:
        log.warning("%s", error)


def is_file_of_torch(path: Path) -> bool:
    """Whether ``torch.save`` wrote the file at `path`."""
    with open(path, "rb") as file:
        return is_torch_file(file.read(CKPT_FILE_START))


def local_path(path: str | os.PathLike[str]) -> Path:
    """`path` on a local file system.

    Raises:
        ValueError: It is a URL.
    """
    if remote.is_remote(path):
        raise ValueError(
            f"Invalid `path`. Expected a path of a local file system, because nothing else can be synced and renamed "
            f"atomically, but received {os.fspath(path)!r}."
        )
    return Path(remote.local_text(path))
