"""How a commit record is written and read.

A record is one line of JSON whose last member is a digest of all bytes before it, so that any change of it shows,
whether its name ends in ``.json`` or, where Lightning has chosen it, in ``.ckpt``. It names every file of the
checkpoint by its path relative to the record's own folder, with size and digest: a folder that was moved still loads.
Records that an older runtime of the contract wrote have no digest and no files.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import xxhash

from ....adapter.contract.exceptions import BrokenCheckpointError, UnstorableStateError
from ....adapter.plumbing.safe_open import UnsafeFileError, open_regular
from .layout import name_of, step_of_name
from .record import CheckpointRecord, FileEntry, LeftOut, RecordMeta, is_path
from .safetensors_header import parse_json

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "LARGEST_RECORD_BYTES",
    "RECORD_MARKER",
    "digest_of",
    "is_torch_file",
    "library_versions",
    "read_record",
    "serialise_record",
]

FORMAT = "genlight.checkpoint"
FORMAT_VERSION = 1
RECORD_MARKER = b'{"format":"genlight.checkpoint"'
"""How every record begins."""

LARGEST_RECORD_BYTES = 256 << 20
"""JSON takes many times its size in memory. Tensors and arrays are not in the record, so this is a lot."""

_TORCH_MAGICS = (b"PK", b"\x80\x02")
"""What a file that ``torch.save`` wrote begins with: a ZIP archive, or a bare pickle."""

_OLD_KEYS = frozenset({"step", "run_id", "request_id", "final", "trainer_checkpoint", "state"})
"""Keys that a record of an older runtime may have."""
_DIGEST_MEMBER = b',"digest":"xxh3_128:'
_REQUIRED = frozenset(field.name for field in dataclasses.fields(CheckpointRecord)) - {
    *("path", "is_old", "writer", "finite_weights", "left_out", "metadata"),
}
"""Members that every record has."""


def digest_of(data: bytes | memoryview) -> str:
    """xxh3-128 in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def serialise_record(
    meta: RecordMeta,
    *,
    step: int,
    state: Any,
    folder: str | None,
    files: Sequence[FileEntry],
    created_at_ms: int,
    left_out: Sequence[LeftOut] = (),
    finite_weights: bool | None = None,
) -> bytes:
    """The bytes of a record."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": step,
        **{name: getattr(meta, name) for name in ("run_id", "attempt", "final", "max_steps", "spec_digest")},
        "spec": dict(meta.spec),
        "created_at_ms": created_at_ms,
        "elapsed_s": meta.elapsed_s,
        "world_size": meta.world_size,
        "metrics": {name: value if math.isfinite(value) else None for name, value in meta.metrics.items()},
        "versions": dict(library_versions()),
        "writer": meta.writer,
        "finite_weights": finite_weights,
        "metadata": dict(meta.metadata),
        "trainer_checkpoint": None if meta.trainer_checkpoint is None else dict(meta.trainer_checkpoint),
        "state": state,
        "folder": folder,
        "files": [
            {"path": f.path, "size": f.size, "xxh3_128": f.xxh3_128} | ({"sha256": f.sha256} if f.sha256 else {})
            for f in files
        ],
    }
    if left_out:
        content["left_out"] = [dataclasses.asdict(entry) for entry in left_out]
    body = json.dumps(content, separators=(",", ":"), allow_nan=False)[:-1].encode()
    if len(body) > LARGEST_RECORD_BYTES - 100:
        hint = f"it takes {len(body):,} bytes of JSON, and a record has room for {LARGEST_RECORD_BYTES:,}; use tensors"
        raise UnstorableStateError("state_dict()", type(state).__name__, hint)
    return body + _DIGEST_MEMBER + digest_of(body).encode() + b'"}\n'


def read_record(path: str | os.PathLike[str]) -> CheckpointRecord:
    """Parse the record at `path` and prove its own digest; its files are not looked at.

    Raises:
        BrokenCheckpointError: The record is damaged, or is not a record.
        FileNotFoundError: There is no such file.
    """
    # A link (``last.ckpt``) stands for the record it points to, beside whose files it lies.
    path = Path(os.path.realpath(path))
    data = _read(path)
    try:
        content = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(name_of(path), f"its record {path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BrokenCheckpointError(name_of(path), f"its record {path.name} is not a JSON object")
    if content.keys() <= _OLD_KEYS and isinstance(content.get("state"), dict):
        return _old_record(path, content)
    _check_own_digest(path, data)
    return _new_record(path, content)


def is_torch_file(path: Path) -> bool:
    """Whether ``torch.save`` wrote the file at `path`.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(2) in _TORCH_MAGICS


def _read(path: Path) -> bytes:
    try:
        descriptor = open_regular(path)
    except UnsafeFileError as error:
        raise BrokenCheckpointError(name_of(path), f"its record {path.name} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        start, size = file.read(len(RECORD_MARKER)), os.fstat(descriptor).st_size
        if start.startswith(_TORCH_MAGICS):  # or gigabytes would be read to find that they are not JSON
            raise BrokenCheckpointError(
                name_of(path), f"{path.name} was written by torch.save and is not a record of genlight"
            )
        if size > LARGEST_RECORD_BYTES:
            raise BrokenCheckpointError(
                name_of(path), f"its record {path.name} has {size:,} bytes, more than {LARGEST_RECORD_BYTES:,}"
            )
        return start + file.read(max(size - len(start), 0))


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Versions of Python and of the libraries that a checkpoint depends on."""
    versions = {"python": platform.python_version()}
    for name in ("genlight", "torch", "lightning", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _check_own_digest(path: Path, data: bytes) -> None:
    body, member, tail = data.rpartition(_DIGEST_MEMBER)
    if not member:
        raise BrokenCheckpointError(name_of(path), f"{path.name} has no digest and is not an older runtime's record")
    if tail != digest_of(body).encode() + b'"}\n':
        raise BrokenCheckpointError(name_of(path), f"the digest of its record {path.name} does not match")


def _old_record(path: Path, content: dict[str, Any]) -> CheckpointRecord:
    step = content.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        step = step_of_name(name_of(path)) or 0
    trainer_checkpoint = content.get("trainer_checkpoint")
    return CheckpointRecord(
        path=path,
        step=step,
        run_id=str(content.get("run_id") or content.get("request_id") or ""),
        state=content["state"],
        final=content.get("final") is True,
        trainer_checkpoint=trainer_checkpoint if isinstance(trainer_checkpoint, dict) else None,
        is_old=True,
    )


def _new_record(path: Path, content: dict[str, Any]) -> CheckpointRecord:
    name = name_of(path)
    if content.get("format") != FORMAT:
        raise BrokenCheckpointError(name, f"{path.name} is not a checkpoint record")
    if content.get("format_version") != FORMAT_VERSION:
        found = content.get("format_version")
        raise BrokenCheckpointError(
            name,
            f"it has format version {found!r}, and this genlight reads versions up to {FORMAT_VERSION}; upgrade it",
        )
    if missing := _REQUIRED - content.keys():
        raise BrokenCheckpointError(name, f"its record {path.name} lacks {', '.join(sorted(missing))}")
    try:
        record = msgspec.convert({**content, "path": path, "is_old": False}, CheckpointRecord)
    except (ValueError, RecursionError) as error:  # as msgspec's own are
        raise BrokenCheckpointError(name, f"its record {path.name} misspells a member: {error}") from None
    for named in [entry.path for entry in record.files] + ([] if record.folder is None else [record.folder]):
        _refuse_outside(name, named)
    if record.folder is not None and len(PurePosixPath(record.folder).parts) > 1:
        raise BrokenCheckpointError(name, f"its record names a folder within another one: {record.folder!r}")
    if len({PurePosixPath(entry.path) for entry in record.files}) < len(record.files):
        raise BrokenCheckpointError(name, "its record names a file twice")
    return record


def _refuse_outside(checkpoint: str, path: str) -> None:
    """A record that came from elsewhere must not make this process read, or delete, files beyond its folder."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or not is_path(path):
        raise BrokenCheckpointError(checkpoint, f"its record names a file outside of its folder: {path!r}")
