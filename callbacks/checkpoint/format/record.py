"""What a commit record says: a checkpoint exists when its record does.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from .layout import name_of

__all__ = ["CheckpointRecord", "FileEntry", "LeftOut", "RecordMeta", "is_path"]


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str
    """Relative to the record's folder, with slashes."""
    size: _Count
    """Bytes."""
    xxh3_128: _Digest
    """Hexadecimal, of the content as it was in memory."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Hexadecimal, where the file was uploaded."""


@dataclass(frozen=True)
class LeftOut:
    """A tensor of the model that a checkpoint leaves out, because the class that is trained builds it."""

    key: str
    dtype: str
    """The element type in a file."""
    shape: tuple[_Count, ...]
    xxh3_128: _Digest
    """Hexadecimal, of its bytes in row-major order."""


@dataclass(frozen=True, kw_only=True)
class RecordMeta:
    """What a run knows about a checkpoint beside its content."""

    step: int | None = None
    """Completed steps; None takes ``global_step`` from the checkpoint itself."""
    run_id: str = ""
    attempt: int = 1
    final: bool = False
    max_steps: int | None = None
    spec_digest: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The fields that `spec_digest` covers, so that a mismatch can name those that differ."""
    trainer_checkpoint: Mapping[str, Any] | None = None
    """What the trainer's ``save_checkpoint`` hook returned."""
    elapsed_s: float = 0.0
    """Training time so far, over all attempts."""
    world_size: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Monitored values at this step, for `keep_best`."""
    writer: str = ""
    """Who decides how long it stays, and may remove it unasked; empty where no one may."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """How the attempt came to be, as `run_metadata` says it."""
    parameters: frozenset[str] = frozenset()
    """Which of the model's tensors are parameters, whose values count for `finite_weights`; not stored."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A parsed record, whose annotations are what one that is read must keep to; a later genlight may write more.

    `is_old` tells one of an older runtime, whose files cannot be checked.
    """

    path: Path
    step: _Count
    run_id: str
    state: Any
    """The trainer's state payload as stored: `load` turns it into values, except an old record's, which is plain."""
    attempt: _Count = 1
    final: bool = False
    max_steps: _Count | None = None
    spec_digest: str | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)
    trainer_checkpoint: Mapping[str, Any] | None = None
    """What the hook returned; a relative ``primary_path`` is relative to `trainer_folder`."""
    elapsed_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    created_at_ms: Annotated[int, msgspec.Meta(ge=-62_000_000_000_000, le=253_000_000_000_000)] = 0
    """Milliseconds since 1970, of the commit; of the years 5 to 9987, which a date can hold in each time zone."""
    folder: str | None = None
    """Name of the data folder beside the record."""
    files: tuple[FileEntry, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    writer: str | None = None
    """None where the record says nothing of it: an older runtime or genlight wrote it."""
    is_old: bool = False
    left_out: tuple[LeftOut, ...] = ()
    """Tensors that the process which loads it must already have."""
    finite_weights: bool | None = None
    """Whether no parameter is nan or infinite; None where that is not known, as of older checkpoints."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """How the attempt that saved it came to be: command, git, host, packages, tags, notes; empty where not known."""

    @property
    def name(self) -> str:
        """The checkpoint's name, such as ``step-00000200``."""
        return name_of(self.path)

    @property
    def data_path(self) -> Path | None:
        """The data folder."""
        return None if self.folder is None else self.path.parent / self.folder

    @property
    def trainer_folder(self) -> Path | None:
        """What the trainer's hook got as ``output_dir``, where it wrote anything.

        For an older runtime's record that is the folder of the same name beside it, wherever both were moved.
        """
        if self.is_old:
            beside = self.path.with_suffix("")
            return beside if beside.is_dir() else None
        return None if self.data_path is None else self.data_path / "trainer"

    @property
    def primary_path(self) -> Path | None:
        """The file or folder that the trainer's hook named for reporting and upload, as an absolute path.

        None where it named none, or one that leads out of its folder: no record makes this process send other
        files.
        """
        named, folder = (self.trainer_checkpoint or {}).get("primary_path"), self.trainer_folder
        if folder is None or not isinstance(named, (str, os.PathLike)) or not is_path(os.fspath(named)):
            return None
        path = Path(os.path.abspath(_moved_with(folder, Path(named)) if self.is_old else folder / named))
        return path if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)) else None

    @property
    def reported_path(self) -> Path:
        """What events and uploads call this checkpoint: what the trainer's hook named and is there, else the record."""
        named = self.primary_path
        return named if named is not None and named.exists() else self.path

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together, the record itself left out."""
        return sum(file.size for file in self.files)

    def file_name(self, file: FileEntry) -> str:
        """The path of `file` within the data folder, such as ``trainer/lora.safetensors``."""
        return file.path.removeprefix(f"{self.folder}/")


def _moved_with(folder: Path, named: Path) -> Path:
    """Where the path that a hook named lies, in a folder that may have been elsewhere when it named it."""
    parts = named.parts
    if named.is_absolute() and folder.name in parts:
        last = len(parts) - 1 - parts[::-1].index(folder.name)
        return folder.joinpath(*parts[last + 1 :])
    return folder / named


def is_path(text: str) -> bool:
    """Whether the system takes `text` for a path at all."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text
