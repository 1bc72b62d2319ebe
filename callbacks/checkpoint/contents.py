"""Proof that what a checkpoint holds can be loaded, beyond the proof that it is what was written.

A digest says that nothing has changed since; it does not say that the file's author meant well. So before a
checkpoint is chosen, its headers, indices and references are decoded and compared with the sizes of the files, without
reading a tensor. What is wrong in them is then a broken checkpoint that is passed over, and never a crash, or memory
for a tensor that the file has no bytes for, once the run depends on it.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.safe_open import UnsafeFileError, open_regular
from .codec.state_tree import check
from .format import tensor_files
from .format.record import MODEL_FILE, STATE_FILE, TRAINER_FOLDER, CheckpointRecord, FileEntry, tensor_file
from .format.tensor_files import (
    ELEMENT_BYTES,
    SLICES_FILE,
    SlicedTensor,
    TypedShape,
    check_tensor,
    parse_json,
    parse_slices,
    rank_of,
    typed_shape,
)
from .storage import find_file, read_proven

__all__ = ["check_contents", "is_of_tensors", "read_contents", "read_header", "sliced_tensors"]


def check_contents(record: CheckpointRecord, *, knows_types: bool = False) -> None:
    """Prove that the parts of a checkpoint, whose digests hold, fit together and can be restored in this process.

    Args:
        record: The checkpoint.
        knows_types: Whether the modules are imported whose types it may name. If not, a type of a module that is not
            imported may still come to be known.

    Raises:
        BrokenCheckpointError: They don't; says which file, or which value.
        OSError: A file cannot be read, which does not mean that it is broken.
    """
    if record.is_old:
        return
    content, stored, _ = read_contents(record)
    source = _Checked(stored)
    for where, tree in (
        ("checkpoint", content["checkpoint"]),
        ("weights_metadata", content.get("weights_metadata")),
        ("state", record.state),
    ):
        try:
            check(tree, source, knows_types=knows_types)
        except (BrokenCheckpointError, OSError, MemoryError):
            raise
        except CheckpointError as error:
            raise BrokenCheckpointError(record.name, str(error)) from error
        except Exception as error:
            raise BrokenCheckpointError(record.name, f"its {where} is malformed: {error!r:.500}") from error


def read_contents(
    record: CheckpointRecord, read: Callable[[CheckpointRecord, FileEntry], dict[str, TypedShape]] | None = None
) -> tuple[dict[str, Any], dict[tuple[str, str], TypedShape], list[SlicedTensor]]:
    """The content of the state file, what the files hold, by file and key, and which of that lies there in slices.

    Args:
        record: Of the checkpoint.
        read: Reads a file of tensors and returns its header; None reads the header alone.

    Raises:
        BrokenCheckpointError: One is missing or malformed, or two files have the same tensor.
    """
    stored: dict[tuple[str, str], TypedShape] = {}
    content: dict[str, Any] | None = None
    for entry in record.files:
        name = record.file_name(entry)
        if name == STATE_FILE:
            content = _parse_state_file(record, read_proven(record, entry))
        elif is_of_tensors(name):
            for key, tensor in (read or read_header)(record, entry).items():
                place = tensor_file(name), key
                if place in stored:
                    raise BrokenCheckpointError(record.name, f"it has {key!r} twice, the second in {entry.path}")
                stored[place] = tensor
    sliced = sliced_tensors(record)
    stored |= {(tensor.file, tensor.key): typed_shape(tensor) for tensor in sliced}
    if content is None:
        raise BrokenCheckpointError(record.name, f"it has no {STATE_FILE}")
    for left in record.left_out:
        size = ELEMENT_BYTES.get(left.dtype)
        if size is None or (MODEL_FILE, left.key) in stored:
            raise BrokenCheckpointError(record.name, f"it does not say what {left.key!r} is that it leaves out")
        stored[MODEL_FILE, left.key] = TypedShape(left.dtype, left.shape, (0, math.prod(left.shape) * size))
    return content, stored, sliced


def sliced_tensors(record: CheckpointRecord) -> list[SlicedTensor]:
    """The tensors that were saved in slices by several ranks; the index is proven, the slices not yet.

    Raises:
        BrokenCheckpointError: The index is missing, changed or malformed, or names bytes that no file has.
    """
    sizes = {record.file_name(entry): entry.size for entry in record.files}
    for entry in record.files:
        if record.file_name(entry) == SLICES_FILE:
            try:
                return parse_slices(read_proven(record, entry), sizes)
            except ValueError as error:
                raise BrokenCheckpointError(record.name, f"{entry.path} is malformed: {error}") from error
    return []


def is_of_tensors(name: str) -> bool:
    """Whether the file `name` of a data folder has tensors that one rank wrote for all."""
    return name.endswith(".safetensors") and not name.startswith(f"{TRAINER_FOLDER}/") and rank_of(name) is None


def read_header(record: CheckpointRecord, entry: FileEntry) -> dict[str, TypedShape]:
    """The tensors of a safetensors file of `record`, from its header alone.

    Raises:
        BrokenCheckpointError: The file is missing, or its header is malformed.
    """
    try:
        descriptor = open_regular(find_file(record, entry))
    except UnsafeFileError as error:
        raise BrokenCheckpointError(record.name, f"{entry.path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            return tensor_files.read_header(file.read, entry.size)
        except ValueError as error:
            raise BrokenCheckpointError(record.name, f"{entry.path} is malformed: {error}") from None


def _parse_state_file(record: CheckpointRecord, data: bytes) -> dict[str, Any]:
    """The content of the state file.

    Raises:
        BrokenCheckpointError: It is not an object with a checkpoint in it.
    """
    try:
        content = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(record.name, f"its {STATE_FILE} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("checkpoint"), dict):
        raise BrokenCheckpointError(record.name, f"its {STATE_FILE} is not an object with a checkpoint in it")
    return content


class _Checked:
    """A `TensorSource` that compares references with what is stored, and describes the tensors."""

    def __init__(self, stored: dict[tuple[str, str], TypedShape]) -> None:
        self._stored = stored

    def tensor(self, reference: Any) -> TypedShape:
        return check_tensor(reference, self._stored)
