"""Checkpoints of this format where Lightning opens a file by itself, rather than through the checkpoint plugin.

``SomeModule.load_from_checkpoint(path)``, a Trainer with Lightning's own plugin and LightningCLI give a path to
``torch.load``, which knows its own files alone, and have no place to add another reader. So the modules of Lightning
that do get a ``torch`` whose ``load`` reads ours too, in this process. It is put there, and not around the functions
that call it, because others import those by name, maybe before this module. ``torch.load`` itself stays as it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import lightning.fabric.utilities.cloud_io as cloud_io
import torch
from typing_extensions import override

from .format.ckpt_file import CKPT_FILE_START, record_in
from .format.layout import RECORD_SUFFIXES
from .format.record_file import RECORD_MARKER
from .loading import MapLocation, load
from .remote import fetch

__all__ = ["let_lightning_read"]

_CLI = "lightning.pytorch.cli"


class _TorchThatReadsOurs(types.ModuleType):
    """The module ``torch``, but for `load`."""

    def load(self, f: Any, map_location: MapLocation = None, **options: Any) -> Any:
        """As ``torch.load``; a checkpoint of ours is proven, and loaded without pickle whatever `options` say."""
        path = _path_of(f)
        if path is not None and _is_record(path):
            return load(path, map_location)
        if path is not None and _is_remote_record(f, path):
            with tempfile.TemporaryDirectory(prefix="genlight-") as scratch:
                return load(fetch(f.fs.unstrip_protocol(path), Path(scratch)), map_location)
        return torch.load(f, map_location=map_location, **options)

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_reader = _TorchThatReadsOurs("torch", torch.__doc__)


def let_lightning_read() -> None:
    """Have Lightning load checkpoints of this format wherever it loads files of torch; once is enough."""
    cloud_io.torch = _reader  # type: ignore[attr-defined]
    if _CLI in sys.modules:  # which is slow to import, and there already where a configuration names a class of ours
        sys.modules[_CLI].torch = _reader  # type: ignore[attr-defined]


def _path_of(file: Any) -> str | None:
    """Where a file lies; of an open one as the built-in ``open`` and fsspec tell it, None where they do not."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "path", getattr(file, "name", None))
    return os.fspath(path) if isinstance(path, str | os.PathLike) else None


def _is_record(path: str) -> bool:
    """Whether a local file has the name and the beginning of a record."""
    if not path.endswith(RECORD_SUFFIXES) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return _begins_as_record(file.read(CKPT_FILE_START))


def _is_remote_record(file: Any, path: str) -> bool:
    """Whether a file that fsspec has opened, of another store than this machine's, has that name and beginning."""
    if not path.endswith(RECORD_SUFFIXES) or not hasattr(getattr(file, "fs", None), "unstrip_protocol"):
        return False
    start = file.read(CKPT_FILE_START)
    file.seek(0)
    return _begins_as_record(start)


def _begins_as_record(start: bytes) -> bool:
    return start.startswith(RECORD_MARKER) or record_in(start) is not None
