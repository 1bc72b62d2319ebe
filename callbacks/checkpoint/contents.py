"""Contents of a checkpoint's files: headers, the index of slices, references, and the proof that they match.

A header has the position of each tensor's bytes. The format is safetensors, written here rather than by its package,
because the bytes are hashed while they stream to the file and never exist twice; ``safetensors.safe_open`` can read
every file.

For each sharded tensor, the index ``slices.json`` lists the parts in ``rank-00001/*.safetensors``, the positions of
their bytes, and their digests, so that a rank reads and proves only the slices that it needs.

A reference of a state tree names a stored tensor. It is compared with the bytes in the file before memory is
allocated for it. A digest proves that nothing has changed since a file was written, but not that its author meant
well. So before a checkpoint is chosen, its headers, indices and references are decoded and compared with the sizes of
the files, without reading a tensor. A fault in them then means that the checkpoint is broken and is skipped. It never
means a crash, or memory for a tensor that the file has no bytes for, once the run depends on it.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ...adapter.contract.exceptions import BrokenCheckpointError
from .codec.state_tree import dtype_of
from .format.record import MODEL_FILE, STATE_FILE, TRAINER_FOLDER, CheckpointRecord, FileEntry, parse_json
from .storage import opened, read_proven

__all__ = [
    "Box",
    "RAW",
    "SLICES_FILE",
    "SlicedTensor",
    "StoredSlice",
    "TORCH_TYPES",
    "TypedShape",
    "build_header",
    "check_tensor",
    "header_from",
    "is_dense",
    "is_of_tensors",
    "tile_exactly",
    "part_folder",
    "rank_of",
    "read_contents",
    "read_header",
    "sliced_tensors",
]

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
"""Names in the format of torch's element types."""
_RAW_TYPES = {"float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex32": 4, "complex128": 16}
_ELEMENT_BYTES = dict(_KNOWN_TYPES.values()) | _RAW_TYPES
"""Size of an element, for each type of the format and for torch's types that are stored raw."""
_WHOLE_NUMBERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
_MOST_ELEMENTS = 2**62

HEADER_LIMIT = 100_000_000
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_DATA_ALIGNMENT = 64
"""The header is padded to a multiple of this, so that a memory map of the file has aligned tensors."""


class TypedShape(msgspec.Struct, frozen=True):
    """One tensor of a file: element type, shape and the half-open range of its bytes after the header."""

    dtype: str
    shape: tuple[_Offset, ...]
    data_offsets: tuple[_Offset, _Offset]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


Stored = dict[tuple[str, str], TypedShape]
"""The tensors in a checkpoint's files, by file and key."""


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
        needed = math.prod(entry.shape) * _ELEMENT_BYTES[entry.dtype]
        if needed != entry.nbytes:
            raise ValueError(f"{key!r} has {entry.nbytes} bytes, but its shape needs {needed}")
        position = end
    if position != data_bytes:
        raise ValueError(f"its safetensors header describes {position} bytes, but {data_bytes} follow it")
    return dict(ordered)


def read_header(record: CheckpointRecord, entry: FileEntry) -> dict[str, TypedShape]:
    """Return the tensors of a safetensors file of `record`, reading only its header.

    Raises:
        BrokenCheckpointError: The file is missing, or its header is malformed.
    """
    with opened(record, entry) as file:
        return header_from(file.read, entry.size)


SLICES_FILE = "slices.json"
_FOLDER_PREFIX = "rank-"


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: its offset and its shape, in elements for each dimension."""

    offset: tuple[_Offset, ...]
    shape: tuple[_Offset, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two parts of one tensor, or None if it is empty."""
        begins = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, shape) if all(size > 0 for size in shape) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last element in each dimension."""
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))


def tile_exactly(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether `boxes`, none of them empty, fill a tensor of `shape` without gap and overlap."""
    parts = sorted(boxes)
    everything = Box((0,) * len(shape), tuple(shape))
    if sum(box.size for box in parts) != everything.size or any(box.overlap(everything) != box for box in parts):
        return False
    # Pairwise disjoint parts with the same total size fill the tensor. In sorted order, only neighbors in the first
    # dimension can overlap. That keeps thousands of slices along one dimension cheap.
    for index, box in enumerate(parts):
        for other in parts[index + 1 :]:
            if other.offset[0] >= box.ends[0]:
                break
            if box.overlap(other) is not None:
                return False
    return True


class StoredSlice(msgspec.Struct, frozen=True):
    """The part of a sharded tensor that one rank has written."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    box: Box
    begin: _Offset
    """Offset of its first byte in the file."""
    xxh3_128: str
    """Hexadecimal digest of its bytes."""


class SlicedTensor(msgspec.Struct, frozen=True):
    """A sharded tensor."""

    file: str
    """Name of its file in each rank's folder, and of the file in its reference."""
    key: str
    dtype: str
    """Torch's name for it."""
    shape: tuple[_Offset, ...]
    slices: tuple[StoredSlice, ...]


def part_folder(rank: int) -> str:
    """Return the folder of a rank's part within the checkpoint's: ``rank-00001`` for 1."""
    return f"{_FOLDER_PREFIX}{rank:05d}"


def rank_of(name: str) -> int | None:
    """Return the rank that wrote the file `name`, as in ``rank-00001/model.safetensors``; None if it is no rank's."""
    folder, slash, _ = name.partition("/")
    number = folder.removeprefix(_FOLDER_PREFIX)
    return int(number) if slash and number != folder and number.isdigit() else None


def is_of_tensors(name: str) -> bool:
    """Whether the file `name` of a data folder has tensors that rank zero wrote for all ranks."""
    return name.endswith(".safetensors") and not name.startswith(f"{TRAINER_FOLDER}/") and rank_of(name) is None


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


def parse_slices(data: bytes, sizes: Mapping[str, int]) -> list[SlicedTensor]:
    """Return the sharded tensors of an index.

    Args:
        data: The index, a list of them as `msgspec.json` encodes it.
        sizes: Sizes of the checkpoint's files, by name.

    Raises:
        ValueError: It is not an index, slices do not tile a tensor, or a file does not have their bytes.
        RecursionError: It is nested too deeply.
    """
    tensors = msgspec.convert(parse_json(data), list[SlicedTensor])
    for tensor in tensors:
        boxes, element = [each.box for each in tensor.slices], _element_bytes(tensor.dtype)
        dimensions = {len(tensor.shape), *(len(part) for box in boxes for part in (box.offset, box.shape))}
        ranks = {each.rank for each in tensor.slices}
        if element is None or len(dimensions) > 1 or dimensions == {0} or len(ranks) < len(boxes):
            raise ValueError(f"its description of {tensor.key!r} is malformed")
        if not tile_exactly(tensor.shape, boxes):
            raise ValueError(f"the slices of {tensor.key!r} do not tile it exactly")
        for each in tensor.slices:
            size = each.box.size * element
            if not size or each.begin + size > sizes.get(f"{part_folder(each.rank)}/{tensor.file}", 0):
                raise ValueError(f"no file has the bytes that {tensor.key!r} needs from rank {each.rank}")
    return tensors


def _typed_shape(tensor: SlicedTensor) -> TypedShape:
    """Return the header's description of `tensor` as if one file held all of it."""
    nbytes = math.prod(tensor.shape) * (_element_bytes(tensor.dtype) or 0)
    if tensor.dtype in TORCH_TYPES:
        return TypedShape(TORCH_TYPES[tensor.dtype], tensor.shape, (0, nbytes))
    return TypedShape(RAW, (nbytes,), (0, nbytes))


class TensorReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The declared keys of a reference to a tensor."""

    file: str = ""
    key: str = ""
    dtype: str | None = None
    shape: list[_Size] | None = None
    stride: list[_Size] | None = None
    requires_grad: bool = False
    parameter: bool = False


def check_tensor(reference: Any, stored: Stored) -> TypedShape:
    """Compare a reference to a tensor with the stored one; return the latter with the type of the reference.

    Args:
        reference: The reference in the state tree.
        stored: The tensors in the files.

    Raises:
        ValueError: It is malformed, or does not match the bytes in the file.
    """
    facts = msgspec.convert(reference, TensorReference)
    where = f"{facts.file}:{facts.key}"
    entry = stored.get((facts.file, facts.key))
    if entry is None:
        raise ValueError(f"there is no tensor {where}")
    shape = list(entry.shape) if facts.dtype is None else facts.shape or []
    element = _ELEMENT_BYTES[entry.dtype] if facts.dtype is None else _element_bytes(facts.dtype)
    if element is None:  # this module does not know the type, but perhaps this torch does
        element = dtype_of(facts.dtype or "").itemsize
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {shape}")
    if math.prod(shape) * element != entry.nbytes:
        raise ValueError(f"{where} has {entry.nbytes} bytes, but its reference needs {math.prod(shape) * element}")
    if facts.stride is not None and not is_dense(shape, facts.stride):
        raise ValueError(f"the strides of {where} go beyond its bytes, or name some of them twice")
    if (facts.requires_grad or facts.parameter) and (facts.dtype or entry.dtype) in _WHOLE_NUMBERS:
        raise ValueError(f"{where} holds integers, which have no gradient")
    return entry if facts.dtype is None else TypedShape(facts.dtype, tuple(shape), entry.data_offsets)


def _element_bytes(dtype: str) -> int | None:
    """Return the size of an element of a torch type; None if the type is not known here."""
    return _ELEMENT_BYTES.get(TORCH_TYPES.get(dtype, dtype))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their range without gaps or repetition, in any order of dimensions."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected and 0 not in shape:
            return False
        expected *= size
    return True


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
        size = math.prod(left.shape) * _ELEMENT_BYTES[left.dtype]
        stored[MODEL_FILE, left.key] = TypedShape(left.dtype, left.shape, (0, size))
    return content, stored, sliced
