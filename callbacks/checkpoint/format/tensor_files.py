"""What the files of tensors say of themselves: headers, indices of slices, and references to what they hold.

A header says where each tensor's bytes lie. The format is that of safetensors, written here rather than by its package,
because the bytes are hashed while they stream to the file and never exist twice; every file is readable by
``safetensors.safe_open``.

An index is there for each rank that wrote slices: ``rank-00001/part.json`` says for each slice in
``rank-00001/*.safetensors`` which part of which tensor it is, where its bytes lie, and the digest of every block of
them, so that a rank which needs a few rows reads and proves just those.

A reference of a state tree names a stored tensor or array. It is compared with the bytes that the file has before
memory is taken for it.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import xxhash

__all__ = [
    "BLOCK",
    "ELEMENT_BYTES",
    "HEADER_LIMIT",
    "PART_FILE",
    "RAW",
    "TORCH_TYPES",
    "SliceEntry",
    "TypedShape",
    "array_type",
    "block_digests",
    "build_header",
    "check_array",
    "check_tensor",
    "parse_header",
    "parse_json",
    "parse_part",
    "part_folder",
    "read_header",
    "rank_of",
    "serialise_part",
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


@dataclass(frozen=True)
class TypedShape:
    """One tensor of a file: element type, shape and the half-open range of its bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.end - self.begin


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


def read_header(read: Callable[[int], bytes], nbytes: int) -> dict[str, TypedShape]:
    """The tensors of a file of `nbytes`, of which `read` gives the next bytes; as `parse_header`."""
    size = int.from_bytes(read(8), "little")
    if size > min(nbytes - 8, HEADER_LIMIT):
        raise ValueError("it has a header longer than the file, or than the format allows")
    return parse_header(read(size), nbytes - 8 - size)


def parse_header(text: bytes, data_bytes: int) -> dict[str, TypedShape]:
    """The tensors of a header (without its length), in the order of their bytes.

    Args:
        text: The header.
        data_bytes: How many bytes follow it in the file; the tensors fill them exactly.

    Raises:
        ValueError: The header is malformed, or describes other bytes than the file has.
    """
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


PART_FILE = "part.json"
BLOCK = 1 << 20
"""Bytes that have a digest of their own."""

_PART, _PART_VERSION = "genlight.checkpoint_part", 1
_FOLDER_PREFIX = "rank-"


class SliceEntry(msgspec.Struct, frozen=True):
    """A slice of one tensor within one file."""

    file: str
    """The name of its file in the rank's folder, which is the tensor's file in its reference."""
    key: str
    dtype: str
    """As torch calls it."""
    whole: tuple[_Offset, ...]
    """Shape of the whole tensor."""
    offset: tuple[_Offset, ...]
    """Where the slice begins in the whole, in elements."""
    shape: tuple[_Offset, ...]
    begin: _Offset
    """Its first byte within the file."""
    size: _Offset
    """Bytes."""
    blocks: tuple[str, ...]
    """xxh3-128 of each `BLOCK` of its bytes, the last one shorter."""


class _Part(msgspec.Struct, frozen=True):
    """The index of a rank's part."""

    format: str
    format_version: int
    slices: list[SliceEntry]


def part_folder(rank: int) -> str:
    """``rank-00001`` for 1: the folder of a rank's part within the checkpoint's."""
    return f"{_FOLDER_PREFIX}{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank whose part the file `name`, as in ``rank-00001/part.json``, belongs to; None if to no rank's."""
    folder, slash, _ = name.partition("/")
    number = folder.removeprefix(_FOLDER_PREFIX)
    return int(number) if slash and number != folder and number.isdigit() else None


def block_digests(data: memoryview) -> tuple[str, ...]:
    """xxh3-128 in hexadecimal of each block."""
    return tuple(xxhash.xxh3_128_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def serialise_part(slices: Iterable[SliceEntry]) -> bytes:
    """The bytes of a part's index."""
    return msgspec.json.encode(_Part(_PART, _PART_VERSION, list(slices)))


def parse_part(data: bytes) -> list[SliceEntry]:
    """The slices of a part's index.

    Raises:
        ValueError: It is none, or one of a later version.
    """
    try:
        part = msgspec.convert(parse_json(data), _Part)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if (part.format, part.format_version) != (_PART, _PART_VERSION):
        raise ValueError(f"it is {part.format!r} of version {part.format_version}, not known to this genlight")
    for entry in part.slices:
        dimensions = len(entry.whole)
        if dimensions == 0 or len(entry.offset) != dimensions or len(entry.shape) != dimensions:
            raise ValueError(f"a slice of {entry.key!r} does not say which part of the tensor it is")
        if math.prod(entry.shape) == 0 or len(entry.blocks) != -(-entry.size // BLOCK):
            raise ValueError(f"a slice of {entry.key!r} has a size that does not fit its shape")
    return part.slices


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_MOST_ELEMENTS = 2**62
_OTHER_ELEMENT_BYTES = {
    "complex128": 16,
    "complex32": 4,
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Of types of torch that the format does not know, so that their bytes are stored raw."""


class ViewFacts(msgspec.Struct, frozen=True):
    """Which part of a stored tensor's bytes a view has."""

    dtype: str
    shape: list[_Size]
    stride: list[_Size]
    offset: _Size
    span: _Size


class ShardedFacts(msgspec.Struct, frozen=True):
    """A tensor that was saved in slices."""

    dtype: str
    shape: list[_Size]


class TensorReference(msgspec.Struct, frozen=True):
    """What a reference to a tensor may say."""

    file: str = ""
    key: str = ""
    dtype: str | None = None
    shape: list[_Size] | None = None
    stride: list[_Size] | None = None
    requires_grad: bool = False
    parameter: bool = False
    view: ViewFacts | None = None
    sharded: ShardedFacts | None = None


class ArrayReference(msgspec.Struct, frozen=True):
    """What a reference to a NumPy array may say."""

    file: str
    key: str
    dtype: str
    shape: list[_Size]
    order: str = "C"


def check_tensor(reference: Any, stored: Mapping[tuple[str, str], TypedShape]) -> ShardedFacts | None:
    """Compare a reference to a tensor with what is stored.

    Args:
        reference: As the state tree has it.
        stored: What the files hold, by file and key.

    Returns:
        What it says of a tensor in slices, which are for the caller to look at; None for any other.

    Raises:
        ValueError: It is malformed, or the file has other bytes.
    """
    facts = msgspec.convert(reference, TensorReference)
    if facts.sharded is not None:
        _elements(facts.sharded.shape)
        return facts.sharded
    where = f"{facts.file}:{facts.key}"
    found = stored.get((facts.file, facts.key))
    if found is None:
        raise ValueError(f"there is no tensor {where}")
    shape = list(found.shape) if facts.dtype is None else facts.shape or []
    element = ELEMENT_BYTES[found.dtype] if facts.dtype is None else _element_bytes(facts.dtype)
    if element is not None and _elements(shape) * element != found.nbytes:
        raise ValueError(f"{where} has {found.nbytes} bytes, but its reference needs {_elements(shape) * element}")
    if facts.stride is not None and _extent(shape, facts.stride) > _elements(shape):
        raise ValueError(f"the strides of {where} leave its bytes")
    if facts.view is not None:
        _check_view(facts.view, found, where)
    return None


def check_array(reference: Any, stored: Mapping[tuple[str, str], TypedShape]) -> None:
    """Compare a reference to an array with what is stored.

    Raises:
        ValueError: It is malformed, or the file has other bytes.
    """
    facts = msgspec.convert(reference, ArrayReference)
    found = stored.get((facts.file, facts.key))
    if found is None:
        raise ValueError(f"there is no array {facts.file}:{facts.key}")
    kind = array_type(facts.dtype)
    if kind.hasobject or _elements(facts.shape) * kind.itemsize != found.nbytes:
        raise ValueError(f"{facts.file}:{facts.key} has {found.nbytes} bytes, but its reference is to others")


def array_type(name: str) -> Any:
    """The NumPy type of a reference."""
    import numpy as np

    return np.dtype(name)


def _check_view(view: ViewFacts, found: TypedShape, where: str) -> None:
    element = _element_bytes(view.dtype) or 1
    _elements(view.shape)
    if view.offset + view.span > found.nbytes or _extent(view.shape, view.stride) * element > view.span:
        raise ValueError(f"a view of {where} leaves its bytes")


def _element_bytes(dtype: str) -> int | None:
    """Size of an element of a torch type; None for one that is not known here."""
    return ELEMENT_BYTES[TORCH_TYPES[dtype]] if dtype in TORCH_TYPES else _OTHER_ELEMENT_BYTES.get(dtype)


def _elements(shape: Sequence[int]) -> int:
    count = math.prod(shape)
    if count > _MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {list(shape)}")
    return count


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, both included; 0 for an empty tensor."""
    if len(shape) != len(stride):
        raise ValueError(f"the shape {list(shape)} and the strides {list(stride)} have other lengths")
    if 0 in shape:
        return 0
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
