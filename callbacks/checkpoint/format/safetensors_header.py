"""The safetensors file format: names of element types, headers, and where each tensor's bytes lie.

Written here rather than by the ``safetensors`` package, because the bytes are hashed while they stream to the file
and never exist twice; every file is readable by ``safetensors.safe_open``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RAW", "TORCH_TYPES", "TypedShape", "build_header", "numpy_type", "parse_header"]

RAW = "U8"
"""What holds the bytes of element types that the format does not know."""

TORCH_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""Element types that the format knows, by the name torch has for them."""

_NUMPY_TYPES = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<f2": "F16",
    "<u4": "U32",
    "<i4": "I32",
    "<f4": "F32",
    "<u8": "U64",
    "<i8": "I64",
    "<f8": "F64",
    "<c8": "C64",
}

_HEADER_LIMIT = 100_000_000
_DATA_ALIGNMENT = 64
"""The header is padded to a multiple of this, so that a memory map of the file has aligned tensors."""


def numpy_type(dtype: str) -> str:
    """The format's name for a NumPy type string, else `RAW`."""
    return _NUMPY_TYPES.get(dtype, RAW)


@dataclass(frozen=True)
class TypedShape:
    """One tensor of a file: element type, shape and the half-open range of its bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def build_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The start of a file that holds `tensors` (key, element type, shape, bytes) one after the other."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, dtype, shape, size in tensors:
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes) -> dict[str, TypedShape]:
    """The tensors of a header (without its length), in the order of their bytes.

    Raises:
        ValueError: The header is malformed.
    """
    if len(text) > _HEADER_LIMIT:
        raise ValueError(f"a header of {len(text)} bytes is longer than the format allows")
    try:
        header = json.loads(text)
        tensors = {
            key: TypedShape(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for key, entry in header.items()
            if key != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its safetensors header is malformed: {error}") from None
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = 0
    for key, entry in ordered.items():
        if entry.begin != position or entry.end < entry.begin:
            raise ValueError(f"its safetensors header has a gap or an overlap at {key!r}")
        position = entry.end
    return ordered
