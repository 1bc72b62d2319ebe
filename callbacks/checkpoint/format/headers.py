"""Headers of safetensors files: the position of each tensor's bytes.

The format is safetensors, so ``safetensors.safe_open`` can read every file. This module writes the headers itself, so
that the bytes of tensors can be hashed while they stream to the file, without a second copy in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec

from ....adapter.plumbing.text import parse_json

RAW = "U8"
"""Type that carries the bytes of element types that the format does not know."""

_KNOWN_TYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""Torch's element types that the format knows: their names in the format, and their bytes."""
TORCH_TYPES = {name: stored for name, (stored, _) in _KNOWN_TYPES.items()}
"""Names of element types in the format, by torch's names."""
_RAW_TYPES = {"float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex32": 4, "complex128": 16}
ELEMENT_BYTES = dict(_KNOWN_TYPES.values()) | _RAW_TYPES
"""Size of an element, for each type of the format and for torch's types that are stored raw."""

HEADER_LIMIT = 100_000_000
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_DATA_ALIGNMENT = 64
"""The header is padded to a multiple of this, so that a memory map of the file has aligned tensors."""


class TypedShape(msgspec.Struct, frozen=True):
    """One tensor of a file: element type, shape and the half-open range of its bytes after the header."""

    dtype: str
    shape: tuple[Offset, ...]
    data_offsets: tuple[Offset, Offset]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


def build_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Return the start of a file that holds `tensors` (key, element type, shape, bytes) one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, dtype, shape, size in tensors:
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def header_from(read: Callable[[int], bytes], nbytes: int) -> dict[str, TypedShape]:
    """Return the tensors of a file of `nbytes`; `read` returns its next bytes. Raises like `parse_header`."""
    size = int.from_bytes(read(8), "little")
    if size > min(nbytes - 8, HEADER_LIMIT):
        raise ValueError("it has a header longer than the file, or than the format allows")
    return parse_header(read(size), nbytes - 8 - size)


def parse_header(text: bytes, data_bytes: int) -> dict[str, TypedShape]:
    """Return the tensors of a header (without its length), in the order of their bytes.

    Args:
        text: The header.
        data_bytes: How many bytes follow it in the file; the tensors fill them exactly.

    Raises:
        ValueError: The header is malformed, or does not match the bytes in the file.
        RecursionError: It is nested too deeply.
    """
    header = msgspec.convert(parse_json(text), dict[str, Any])
    header.pop("__metadata__", None)
    entries = {key: msgspec.convert(entry, TypedShape) for key, entry in header.items()}
    ordered = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    position = 0
    for key, entry in ordered:
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise ValueError(f"its safetensors header has a gap or an overlap at {key!r}")
        if entry.dtype not in TORCH_TYPES.values():
            raise ValueError(f"its safetensors header has an unknown element type {entry.dtype!r} at {key!r}")
        needed = math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]
        if needed != entry.nbytes:
            raise ValueError(f"{key!r} has {entry.nbytes} bytes, but its shape needs {needed}")
        position = end
    if position != data_bytes:
        raise ValueError(f"its safetensors header describes {position} bytes, but {data_bytes} follow it")
    return dict(ordered)


def element_bytes(dtype: str) -> int | None:
    """Return the size of an element of a torch type; None if the type is not known here."""
    return ELEMENT_BYTES.get(TORCH_TYPES.get(dtype, dtype))
