"""Contents of a checkpoint's files: its state, and all tensors with their types and shapes, without their values.

A digest proves that nothing has changed since a file was written, but not that its author meant well. So before a
checkpoint is chosen, its headers, indices and references are decoded and compared with the sizes of the files, without
reading a tensor. A fault in them then means that the checkpoint is broken and is skipped. It never means a crash, or
memory for a tensor that the file has no bytes for, once the run depends on it.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...adapter.contract.exceptions import BrokenCheckpointError
from .codec.references import Stored
from .format.headers import ELEMENT_BYTES, RAW, TORCH_TYPES, TypedShape, element_bytes, header_from
from .format.record import MODEL_FILE, STATE_FILE, CheckpointRecord, FileEntry, parse_json
from .format.slice_index import SLICES_FILE, SlicedTensor, is_of_tensors, parse_slices
from .storage import open_file_of, read_proven


def read_header(record: CheckpointRecord, entry: FileEntry) -> dict[str, TypedShape]:
    """Return the tensors of a safetensors file of `record`, reading only its header.

    Raises:
        BrokenCheckpointError: The file is missing, or its header is malformed.
    """
    with open_file_of(record, entry) as file:
        return header_from(file.read, entry.size)


def sliced_tensors(record: CheckpointRecord) -> list[SlicedTensor]:
    """Return the tensors that several ranks saved in slices; the index is proven, the slices not yet.

    Raises:
        BrokenCheckpointError: The index is missing, changed or malformed, or names bytes that are in no file.
    """
    files = {record.file_name(entry): entry for entry in record.files}
    if SLICES_FILE not in files:
        return []
    sizes = {name: entry.size for name, entry in files.items()}
    return read_proven(record, files[SLICES_FILE], lambda data: parse_slices(data, sizes))


def _typed_shape(tensor: SlicedTensor) -> TypedShape:
    """Return the header's description of `tensor` as if one file held all of it."""
    nbytes = math.prod(tensor.shape) * (element_bytes(tensor.dtype) or 0)
    if tensor.dtype in TORCH_TYPES:
        return TypedShape(TORCH_TYPES[tensor.dtype], tensor.shape, (0, nbytes))
    return TypedShape(RAW, (nbytes,), (0, nbytes))


def read_contents(
    record: CheckpointRecord, read: Callable[[CheckpointRecord, FileEntry], dict[str, TypedShape]] = read_header
) -> tuple[dict[str, Any], Stored, list[SlicedTensor]]:
    """Return the content of the state file, the tensors in all files, and those that are stored in slices.

    Args:
        record: The checkpoint's record.
        read: Reads a file of tensors and returns its header.

    Raises:
        BrokenCheckpointError: A file is missing or malformed, or two files have the same tensor.
    """
    stored: Stored = {}
    content: Any = None
    for entry in record.files:
        name = record.file_name(entry)
        if name == STATE_FILE:
            content = read_proven(record, entry, parse_json)
        elif is_of_tensors(name):
            for key, tensor in read(record, entry).items():
                place = record.tensor_file(entry), key
                if place in stored:
                    raise BrokenCheckpointError(record.name, f"it has {key!r} twice, the second in {entry.path}")
                stored[place] = tensor
    if not isinstance(content, dict) or not isinstance(content.get("checkpoint"), dict):
        raise BrokenCheckpointError(record.name, f"it has no {STATE_FILE} that is an object with a checkpoint in it")
    sliced = sliced_tensors(record)
    stored |= {(tensor.file, tensor.key): _typed_shape(tensor) for tensor in sliced}
    for left in record.left_out:
        if left.dtype not in TORCH_TYPES.values() or (MODEL_FILE, left.key) in stored:
            raise BrokenCheckpointError(record.name, f"its description of the omitted tensor {left.key!r} is malformed")
        size = math.prod(left.shape) * ELEMENT_BYTES[left.dtype]
        stored[MODEL_FILE, left.key] = TypedShape(left.dtype, left.shape, (0, size))
    return content, stored, sliced
