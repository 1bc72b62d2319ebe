"""Names of a checkpoint's parts within its directory.

A checkpoint `NAME` is a commit record ``NAME.json`` (or, when Lightning's ``ModelCheckpoint`` chose the path,
``NAME.ckpt``) and a folder ``NAME/`` with its data. A record that replaces an older one of the same name takes the
folder name that the old one does not use, ``NAME~1/``, so that the old checkpoint stays whole until the new one is.

Where tensors are sharded, each rank has a folder ``NAME/rank-00001/`` with its slices, in files of the names below, and
the index of what they hold (see `parts`). The files of those names in ``NAME/`` itself hold what is not sharded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ....adapter.plumbing.durable import TEMPORARY_PREFIX

__all__ = [
    "ARRAYS_FILE",
    "FINAL_NAME",
    "MODEL_FILE",
    "RECORD_SUFFIXES",
    "STATE_FILE",
    "TENSORS_FILE",
    "TRAINER_FOLDER",
    "alternative_folder",
    "is_temporary",
    "name_of",
    "record_paths",
    "record_path",
    "step_name",
    "step_of_name",
]

MODEL_FILE = "model.safetensors"
"""Tensors of ``LightningModule.state_dict()`` under its own keys."""
TENSORS_FILE = "training_state.safetensors"
"""All other tensors, under the path where they sit."""
ARRAYS_FILE = "arrays.safetensors"
"""NumPy arrays, under the path where they sit."""
STATE_FILE = "training_state.json"
"""Everything that is not a tensor, with references to the tensors."""
TRAINER_FOLDER = "trainer"
"""What the trainer's own ``save_checkpoint`` hook wrote."""

FINAL_NAME = "final"
RECORD_SUFFIXES = (".json", ".ckpt")
_STEP_NAME = re.compile(r"step-(\d+)")
_OUR_RECORD = re.compile(r"(?:step-\d+|final)\.json|.*\.ckpt", re.DOTALL)
_BEGINNING_BYTES = 64 * 1024


def step_name(step: int) -> str:
    """``step-00000200`` for 200."""
    return f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """The step that a checkpoint's name tells, or None."""
    match = _STEP_NAME.match(name)
    return int(match.group(1)) if match else None


def record_path(path: str | os.PathLike[str]) -> Path:
    """The record of the checkpoint at `path`, which may name the record, its folder, or neither suffix; absolute."""
    path = Path(os.path.abspath(path))
    return path if path.suffix in RECORD_SUFFIXES else path.parent / f"{path.name}.json"


def name_of(record: Path) -> str:
    """The checkpoint's name: its record's without the suffix."""
    return record.name.removesuffix(record.suffix) if record.suffix in RECORD_SUFFIXES else record.name


def alternative_folder(name: str, taken: str | None) -> str:
    """The folder name of `name` that is not `taken`."""
    return f"{name}~1" if taken == name else name


def is_temporary(name: str) -> bool:
    """Whether a file or folder is the unfinished work of a process."""
    return name.startswith(TEMPORARY_PREFIX)


def record_paths(directory: str | os.PathLike[str]) -> list[Path]:
    """All files in `directory` that are records by name and look, sorted; empty when there is no such directory.

    A file of a record's suffix whose name is not one of ours may be anything. It is looked at, but not parsed.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    return [
        Path(entry.path)
        for entry in entries
        if entry.name.endswith(RECORD_SUFFIXES)
        and not is_temporary(entry.name)
        and entry.is_file()
        and (_OUR_RECORD.fullmatch(entry.name) is not None or _may_be_record(entry.path))
    ]


def _may_be_record(path: str) -> bool:
    """Whether a file begins as a record of ours, or holds the ``state`` that one of an older runtime has."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return True  # whoever reads it says why that cannot be
    try:
        beginning = os.read(descriptor, _BEGINNING_BYTES)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return beginning.startswith(b'{"format"') or b'"state"' in beginning or len(beginning) == _BEGINNING_BYTES
