"""The safetensors file format: names of element types, headers, and where each tensor's bytes lie.

Written here rather than by the ``safetensors`` package, because the bytes are hashed while they stream to the file
and never exist twice; every file is readable by ``safetensors.safe_open``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

__all__ = [
    "ELEMENT_BYTES",
    "HEADER_LIMIT",
    "RAW",
    "TORCH_TYPES",
    "TypedShape",
    "build_header",
    "numpy_type",
    "parse_header",
    "parse_json",
]

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

ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Size of an element of each type."""

HEADER_LIMIT = 100_000_000
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
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


def parse_json(data: bytes) -> Any:
    """What JSON of a checkpoint says; of a key that is there twice, no reader could tell which one was meant.

    Raises:
        ValueError: It is not JSON, or an object has a key twice.
        RecursionError: It is nested too deeply.
    """
    return json.loads(data, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


class _Entry(msgspec.Struct, frozen=True):
    """One tensor as a header describes it."""

    dtype: str
    shape: list[_Offset]
    data_offsets: tuple[_Offset, _Offset]


def parse_header(text: bytes, data_bytes: int) -> dict[str, TypedShape]:
    """The tensors of a header (without its length), in the order of their bytes.

    Args:
        text: The header.
        data_bytes: How many bytes follow it in the file; the tensors fill them exactly.

    Raises:
        ValueError: The header is malformed, or describes other bytes than the file has.
    """
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"a header of {len(text)} bytes is longer than the format allows")
    try:
        header = msgspec.convert(parse_json(text), dict[str, Any])
        entries = {key: msgspec.convert(entry, _Entry) for key, entry in header.items() if key != "__metadata__"}
    except (ValueError, RecursionError) as error:  # as msgspec's own are
        raise ValueError(f"its safetensors header is malformed: {error}") from None
    ordered = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    position = 0
    for key, entry in ordered:
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise ValueError(f"its safetensors header has a gap or an overlap at {key!r}")
        if entry.dtype not in ELEMENT_BYTES:
            raise ValueError(f"its safetensors header has an unknown element type {entry.dtype!r} at {key!r}")
        needed = math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]
        if needed != end - begin:
            raise ValueError(f"{key!r} has {end - begin} bytes, but its shape needs {needed}")
        position = end
    if position != data_bytes:
        raise ValueError(f"its safetensors header describes {position} bytes, but {data_bytes} follow it")
    return {key: TypedShape(entry.dtype, tuple(entry.shape), *entry.data_offsets) for key, entry in ordered}
