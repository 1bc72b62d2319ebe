"""Saving a checkpoint: take the state apart, then write it.

`prepare` runs in the training thread and touches no disk; `write` runs in any thread. Between the two, an asynchronous
save copies the tensors (`snapshot`), because training goes on changing them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...adapter.contract.exceptions import CheckpointError, UnstorableStateError
from ..finite import are_finite
from .codec.state_tree import encode
from .codec.tensor_bytes import bytes_of
from .codec.tensor_table import Entry, Slice, TensorTable
from .format.layout import MODEL_FILE, STATE_FILE, TRAINER_FOLDER, record_path
from .format.record import CheckpointRecord, FileEntry, LeftOut, RecordMeta
from .format.record_file import in_file, read_record, serialise_record
from .ownership import STATE_MARKER, choose_folder
from .shared_tensors import NewFile, SharedFile, write_shared
from .storage.commit import Staging, commit, require_space, stage
from .storage.tensor_files import in_order, write_tensors
from .storage.write_file import hash_file, naming_the_checkpoint, write_file

__all__ = [
    "CONTRACT_KEY",
    "SPACE_FOR_THE_REST",
    "Prepared",
    "finite_weights",
    "prepare",
    "publish",
    "save",
    "write",
    "write_files",
]

CONTRACT_KEY = "genlight"
"""The member of a Lightning checkpoint that holds what the trainer contract adds; its ``state`` is the payload."""

_WEIGHTS = "state_dict"
SPACE_FOR_THE_REST = 1 << 20
"""Bytes beside tensors and JSON: headers, the record, folders."""


@dataclass
class Prepared:
    """A checkpoint that was taken apart and is not written yet."""

    meta: RecordMeta
    step: int
    state: Any
    """The trainer's payload, encoded; it goes into the record."""
    rest: bytes
    """Everything else that is not a tensor; the content of the state file."""
    entries: list[Entry]
    slices: list[Entry] = field(default_factory=list)
    """What this rank holds of sharded tensors."""
    wholes: dict[tuple[str, str], Slice] = field(default_factory=dict)
    """All sharded tensors, by file and key."""
    kept: list[SharedFile] = field(default_factory=list)
    """Files of earlier checkpoints that this one shares."""
    new_files: list[NewFile] = field(default_factory=list)
    """Files that later ones may share."""
    left_out: list[LeftOut] = field(default_factory=list)
    nonfinite_left_out: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes that will be written, about."""
        new = [entry for file in self.new_files for entry in file.entries]
        return len(self.rest) + sum(entry.nbytes for entry in (*self.entries, *self.slices, *new))

    @property
    def beside(self) -> frozenset[str]:
        """Names of the shared files that lie beside the records; complete once they are written."""
        new = (file.written for file in self.new_files if file.is_beside)
        return frozenset(file.name for file in self.kept if file.is_beside) | {file.path for file in new if file}


def save(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    *,
    meta: RecordMeta | None = None,
    staging: Staging | None = None,
) -> CheckpointRecord:
    """Write a checkpoint; whole and durable when this returns.

    Args:
        path: Its record, with or without suffix: ``<directory>/step-00000200``.
        checkpoint: Lightning's dump, or any dictionary. ``checkpoint["genlight"]["state"]`` goes into the record.
        meta: What the record says beside that.
        staging: The folder that already holds what the trainer's hook wrote to its ``trainer`` folder.

    Raises:
        UnstorableStateError: A value cannot be stored; nothing was written.
        CheckpointError: The disk has no space for it; nothing was written.
        UnwrittenCheckpointError: It could not be written; the checkpoint that was there before still is.
    """
    return write(record_path(path), prepare(checkpoint, meta or RecordMeta()), staging=staging)


def prepare(checkpoint: Mapping[str, Any], meta: RecordMeta) -> Prepared:
    """Take a checkpoint apart into JSON and tensors; its tensors are referred to, not copied.

    Raises:
        UnstorableStateError: A value cannot be stored; names its path.
    """
    table = TensorTable()
    rest = {name: value for name, value in checkpoint.items() if name not in (_WEIGHTS, CONTRACT_KEY)}
    encoded = {}
    if _WEIGHTS in checkpoint:
        encoded[_WEIGHTS] = _encode_weights(checkpoint[_WEIGHTS], table)
    encoded |= {name: encode(value, table, root=("checkpoint", name)) for name, value in rest.items()}
    contract = dict(checkpoint.get(CONTRACT_KEY, {}))
    state = encode(contract.pop("state", {}), table, root="state")
    if CONTRACT_KEY in checkpoint:
        encoded[CONTRACT_KEY] = encode(contract, table, root=CONTRACT_KEY)
    _check_json(meta.trainer_checkpoint)
    entries = sorted(table.entries(), key=lambda entry: entry.file)
    step = meta.step if meta.step is not None else int(checkpoint.get("global_step", 0))
    metadata = encode(getattr(checkpoint.get(_WEIGHTS), "_metadata", None), table, root="state_dict._metadata")
    return Prepared(meta, step, state, _state_file(encoded, metadata), entries, table.slices, table.wholes)


def write(path: Path, prepared: Prepared, *, staging: Staging | None = None) -> CheckpointRecord:
    """Write what `prepare` took apart; whole and durable when this returns.

    Raises:
        CheckpointError: The disk has no space for it, or it holds sharded tensors; nothing was written.
        UnwrittenCheckpointError: It could not be written; the checkpoint that was there before still is.
    """
    try:
        if prepared.wholes:
            raise CheckpointError(
                f"{next(iter(prepared.wholes))[1]} is sharded over several ranks, which save it together: use the "
                "Checkpoint callback under ModelParallelStrategy, or gather it first with full_tensor()"
            )
        with naming_the_checkpoint(path, prepared.nbytes):
            require_space(path.parent, prepared.nbytes + SPACE_FOR_THE_REST)
            staging = staging or stage(path)
            files = write_files(staging, prepared)
            return publish(path, prepared, staging, files, finite_weights=finite_weights(prepared))
    except BaseException:
        if staging is not None:
            staging.discard()
        raise


def finite_weights(prepared: Prepared) -> bool | None:
    """Whether all parameters that this rank holds are finite; None where it cannot tell them from buffers.

    An infinite buffer is nothing unusual: a mask is one.
    """
    slices = [entry.source for entry in prepared.slices if entry.file == MODEL_FILE]
    entries = [entry for entry in prepared.entries if entry.file == MODEL_FILE]
    shared = [file.nonfinite for file in prepared.kept] + [file.nonfinite for file in prepared.new_files]
    shared += [prepared.nonfinite_left_out] if prepared.left_out else []
    nonfinite = frozenset().union(*shared)
    if not are_finite(slices):
        return False
    if not nonfinite and are_finite([entry.source for entry in entries]):
        return True if entries or slices or shared else None
    names = prepared.meta.parameters
    if not names:
        return None
    return nonfinite.isdisjoint(names) and are_finite([entry.source for entry in entries if entry.key in names])


def publish(
    path: Path,
    prepared: Prepared,
    staging: Staging,
    files: Iterable[FileEntry],
    *,
    finite_weights: bool | None,
) -> CheckpointRecord:
    """Commit what was staged; `files` are named relative to the staging folder.

    Raises:
        CheckpointError: Something that is not a checkpoint has its name.
        OSError: It could not be committed; the checkpoint that was there before still is.
    """
    folder, beside = choose_folder(path), prepared.beside
    files = [
        file if file.path in beside else replace(file, path=f"{folder}/{file.path}")
        for file in sorted(files, key=lambda file: file.path)
    ]
    record = serialise_record(
        _relative_primary(prepared.meta, staging),
        step=prepared.step,
        state=prepared.state,
        folder=folder,
        files=files,
        created_at_ms=time.time_ns() // 1_000_000,
        is_sharded=bool(prepared.wholes),
        is_shared=bool(prepared.kept or prepared.new_files),
        left_out=prepared.left_out,
        finite_weights=finite_weights,
    )
    commit(staging, folder, in_file(path, record))
    return read_record(path)


def _encode_weights(weights: Any, table: TensorTable) -> Any:
    """Like `encode`, with the model's own names for its tensors."""
    import torch

    if not isinstance(weights, Mapping) or not all(type(name) is str for name in weights):
        return encode(weights, table, root=("checkpoint", _WEIGHTS))
    return {
        "$dict": [
            [
                name,
                {"$tensor": table.add_model_tensor(name, value, ("checkpoint", _WEIGHTS, name))}
                if isinstance(value, torch.Tensor) and value.layout == torch.strided
                else encode(value, table, root=("checkpoint", _WEIGHTS, name)),
            ]
            for name, value in weights.items()
        ]
    }


def _state_file(encoded: dict[str, Any], weights_metadata: Any) -> bytes:
    content = {
        "format_version": 1,
        "weights_metadata": weights_metadata,
        "checkpoint": {"$dict": list(encoded.items())},
    }
    return STATE_MARKER + b"," + json.dumps(content, separators=(",", ":"), allow_nan=False)[1:].encode()


def write_files(staging: Staging, prepared: Prepared) -> list[FileEntry]:
    """Write everything but slices; files are named relative to the staging folder."""
    written = [(TRAINER_FOLDER + "/" + name, *facts) for name, facts in _hook_files(staging.path / TRAINER_FOLDER)]
    by_file: dict[str, list[Entry]] = {}
    for entry in prepared.entries:
        by_file.setdefault(entry.file, []).append(entry)
    for file, entries in by_file.items():
        buffers = (bytes_of(entry.source) for entry in in_order(entries))
        written.append((file, *write_tensors(staging.path / file, entries, buffers)))
    written.append((STATE_FILE, *write_file(staging.path / STATE_FILE, [prepared.rest])))
    own = [FileEntry(name, size, digest) for name, size, digest in written]
    new = [write_shared(staging, file) for file in prepared.new_files]
    return own + new + [FileEntry(file.name, file.size, file.xxh3_128) for file in prepared.kept]


def _hook_files(folder: Path) -> list[tuple[str, tuple[int, str]]]:
    """Make durable what the trainer's hook wrote; name within `folder`, then size and digest of each file."""
    found = []
    for path, folders, files in os.walk(folder):
        for name in sorted([*files, *(name for name in folders if (Path(path) / name).is_symlink())]):
            file = Path(path) / name
            if file.is_symlink():
                _replace_link(file)
            _fsync_file(file)
            found.append((file.relative_to(folder).as_posix(), hash_file(file)))
    return found


def _replace_link(link: Path) -> None:
    """Put the file that a link points to in its place: a link would not survive a move, nor be durable."""
    target = link.resolve()
    if not target.is_file():
        raise CheckpointError(f"save_checkpoint left a link that does not lead to a file: {link.name} -> {target}")
    link.unlink()
    shutil.copyfile(target, link)


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _relative_primary(meta: RecordMeta, staging: Staging) -> RecordMeta:
    """`meta` with a ``primary_path`` that holds after the folder got its name, and wherever it is moved to."""
    named = (meta.trainer_checkpoint or {}).get("primary_path")
    if meta.trainer_checkpoint is None or not isinstance(named, (str, os.PathLike)):
        return meta
    path, output = Path(named), (staging.path / TRAINER_FOLDER).absolute()
    if path.is_absolute() and path.is_relative_to(output):
        path = path.relative_to(output)
    return replace(meta, trainer_checkpoint={**meta.trainer_checkpoint, "primary_path": str(path)})


def _check_json(value: Mapping[str, Any] | None) -> None:
    """What the hook returned goes into the record as it is, where orchestrators read it."""
    if value is None:
        return
    try:
        json.dumps({**value, "primary_path": str(value.get("primary_path"))}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnstorableStateError("save_checkpoint()", f"{type(value).__name__} ({error})", "return JSON") from None
