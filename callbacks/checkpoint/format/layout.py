"""Names of a checkpoint's parts within its directory.

A checkpoint `NAME` is a commit record ``NAME.json`` (or, when Lightning's ``ModelCheckpoint`` chose the path,
``NAME.ckpt``) and a folder ``NAME/`` with its data. Where something of that name is there already, the folder is
``NAME~1/`` or the next that is free; the record names it. So an old checkpoint of the same name stays whole until the
new one is, and what is not a checkpoint's stays for good.

Where tensors are sharded, each rank has a folder ``NAME/rank-00001/`` with its slices, in files of the names below, and
the index of what they hold (see `parts`). The files of those names in ``NAME/`` itself hold what is not sharded.

Frozen weights have a file of their own, ``NAME/frozen.safetensors``: hard links to one another in all checkpoints that
have the same.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ....adapter.plumbing.durable import TEMPORARY_PREFIX
from ....adapter.plumbing.urls import hide_urls

__all__ = [
    "ARRAYS_FILE",
    "FINAL_NAME",
    "FROZEN_FILE",
    "MODEL_FILE",
    "SCORES_FILE",
    "STATE_FILE",
    "TENSORS_FILE",
    "TRAINER_FOLDER",
    "UNCOMMITTED_FILE",
    "folder_names",
    "is_name_of_callback",
    "is_record_of_callback",
    "is_temporary",
    "local_path",
    "name_of",
    "name_of_folder",
    "record_paths",
    "record_path",
    "step_name",
    "step_of_name",
    "tensor_file",
]

MODEL_FILE = "model.safetensors"
"""Tensors of ``LightningModule.state_dict()`` under its own keys."""
FROZEN_FILE = "frozen.safetensors"
"""Those of `MODEL_FILE` that training leaves as they are, where several checkpoints share them."""
TENSORS_FILE = "training_state.safetensors"
"""All other tensors, under the path where they sit."""
ARRAYS_FILE = "arrays.safetensors"
"""NumPy arrays, under the path where they sit."""
STATE_FILE = "training_state.json"
"""Everything that is not a tensor, with references to the tensors."""
TRAINER_FOLDER = "trainer"
"""What the trainer's own ``save_checkpoint`` hook wrote."""
SCORES_FILE = "scores.json"
"""Scores that came after the record was written, which therefore does not list it."""
UNCOMMITTED_FILE = ".uncommitted"
"""Marks a data folder that no record names yet, or no longer: what a killed process leaves with it is debris."""

FINAL_NAME = "final"
RECORD_SUFFIXES = (".json", ".ckpt")
_STEP_NAME = re.compile(r"step-(\d+)")
_NAME_OF_CALLBACK = re.compile(rf"step-\d{{8,}}|{FINAL_NAME}")
_NUMBERED_FOLDER = re.compile(r"(.+)~\d+", re.DOTALL)
_TEMPORARY = re.compile(
    # A process number and a random one follow the name. Names of the callback's own need no full length to be known.
    rf"{re.escape(TEMPORARY_PREFIX)}(?:.+-\d+-[0-9a-f]{{8}}|(?:{_NAME_OF_CALLBACK.pattern})[^-]*-\d+-[0-9a-f]+)",
    re.DOTALL,
)
_BEGINNING_BYTES = 64 * 1024


def step_name(step: int) -> str:
    """``step-00000200`` for 200."""
    return f"step-{step:08d}"


def step_of_name(name: str) -> int | None:
    """The step that a checkpoint's name tells, or None."""
    match = _STEP_NAME.match(name)
    return int(match.group(1)) if match else None


def tensor_file(name: str) -> str:
    """The file that references mean where the tensors lie in `name`."""
    return MODEL_FILE if name == FROZEN_FILE else name


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a URL of something else than a local file."""
    return "://" in _without_scheme(path)


def local_path(path: str | os.PathLike[str], argument: str = "dirpath") -> Path:
    """`path` on a local file system.

    Raises:
        ValueError: It is a URL; names the `argument` that it is.
    """
    if is_remote(path):
        raise ValueError(
            f"Invalid `{argument}`. Checkpoints are on a local file system, because nothing else can be synced and "
            f"renamed atomically, but received {hide_urls(os.fspath(path))!r}. To save, name a local folder, and "
            "`uploads.targets` of a job, or `targets` of UploadArtifacts, for copies elsewhere. To load, copy the "
            "record and the folder of its name here first; a job does so for `inputs.resume_checkpoint_url`."
        )
    return Path(_without_scheme(path))


def _without_scheme(path: str | os.PathLike[str]) -> str:
    """`path` without the ``file:`` that fsspec, too, takes off; Lightning makes ``file:/a`` of ``file:///a``."""
    text = os.fspath(path)
    return text.removeprefix("file:").removeprefix("//") if text.startswith("file:/") else text


def record_path(path: str | os.PathLike[str]) -> Path:
    """The record of the checkpoint at `path`, which may name the record, its folder, or neither suffix; absolute."""
    path = Path(os.path.abspath(path))
    return path if path.suffix in RECORD_SUFFIXES else path.parent / f"{path.name}.json"


def name_of(record: Path) -> str:
    """The checkpoint's name: its record's without the suffix."""
    return record.name.removesuffix(record.suffix) if record.suffix in RECORD_SUFFIXES else record.name


def folder_names(name: str) -> Iterator[str]:
    """The names that the data folder of the checkpoint `name` may have, in the order they are tried; endless."""
    yield name
    yield from (f"{name}~{number}" for number in itertools.count(1))


def name_of_folder(folder: str) -> str:
    """The checkpoint's name that a data folder's name tells: ``last`` for ``last~1``."""
    match = _NUMBERED_FOLDER.fullmatch(folder)
    return match.group(1) if match else folder


def is_name_of_callback(name: str) -> bool:
    """Whether the `Checkpoint` callback gives checkpoints such a name."""
    return _NAME_OF_CALLBACK.fullmatch(name) is not None


def is_record_of_callback(record: Path) -> bool:
    """Whether `record` has a path such as only the `Checkpoint` callback gives."""
    return record.suffix == ".json" and is_name_of_callback(name_of(record))


def is_temporary(name: str) -> bool:
    """Whether a file or folder is the unfinished work of a process of ours."""
    return _TEMPORARY.fullmatch(name) is not None


def record_paths(directory: str | os.PathLike[str]) -> list[Path]:
    """All files in `directory` that are records by name and look, sorted; empty when there is no such directory.

    A file of a record's suffix whose name is not one of ours may be anything. It is read, but not parsed.
    """
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    paths = [Path(directory, name) for name in names if name.endswith(RECORD_SUFFIXES) and not is_temporary(name)]
    return [
        path
        for path in paths
        if os.path.isfile(path)  # which a link to itself, say, is not
        and (path.suffix == ".ckpt" or is_record_of_callback(path) or _may_be_record(path))
    ]


def _may_be_record(path: Path) -> bool:
    """Whether a file begins as a record of ours, or holds the ``state`` that one of an older runtime has."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return True  # its reader says why it cannot be read
    try:
        beginning = os.read(descriptor, _BEGINNING_BYTES)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return beginning.startswith(b'{"format"') or b'"state"' in beginning or len(beginning) == _BEGINNING_BYTES
