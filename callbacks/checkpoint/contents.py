"""What the files of a checkpoint hold: headers, the index of slices, references, and the proof that they fit.

A header says where each tensor's bytes lie. The format is that of safetensors, written here rather than by its package,
because the bytes are hashed while they stream to the file and never exist twice; every file is readable by
``safetensors.safe_open``.

The index ``slices.json`` says of each sharded tensor which part of it lies in ``rank-00001/*.safetensors``, where the
bytes of that are, and their digest, so that a rank reads and proves just the slices that it needs.

A reference of a state tree names a stored tensor. It is compared with the bytes that the file has before memory is
taken for it. A digest says that nothing has changed since a file was written; it does not say that its author meant
well. So before a checkpoint is chosen, its headers, indices and references are decoded and compared with the sizes of
the files, without reading a tensor. What is wrong in them is then a broken checkpoint that is passed over, and never a
crash, or memory for a tensor that the file has no bytes for, once the run depends on it.

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
"""Carriers for the bytes of element types that the format does not know."""

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
"""What the format calls torch's element types that it knows, and their bytes."""
TORCH_TYPES = {name: stored for name, (stored, _) in _KNOWN_TYPES.items()}
"""Element types that the format knows, by the name torch has for them."""
_RAW_TYPES = {"float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex32": 4, "complex128": 16}
_ELEMENT_BYTES = dict(_KNOWN_TYPES.values()) | _RAW_TYPES
"""Size of an element of each type of the format, and of types of torch that are stored raw."""
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
"""What the files of a checkpoint hold, by file and key."""


def build_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The start of a file that holds `tensors` (key, element type, shape, bytes) one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, dtype, shape, size in tensors:
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def header_from(read: Callable[[int], bytes], nbytes: int) -> dict[str, TypedShape]:
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
    """The tensors of a safetensors file of `record`, from its header alone.

    Raises:
        BrokenCheckpointError: The file is missing, or its header is malformed.
    """
    with opened(record, entry) as file:
        return header_from(file.read, entry.size)


SLICES_FILE = "slices.json"
_FOLDER_PREFIX = "rank-"


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: where it begins and how large it is, in elements, for each dimension."""

    offset: tuple[_Offset, ...]
    shape: tuple[_Offset, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The intersection of two slices of one tensor; None where it is empty."""
        begins = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, shape) if all(size > 0 for size in shape) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last element in each dimension."""
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))


def tile_exactly(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether `boxes` fill a tensor of `shape` without gap and overlap; none of them is empty."""
    found = list(boxes)
    whole = Box((0,) * len(shape), tuple(shape))
    if sum(box.size for box in found) != whole.size or any(box.overlap(whole) != box for box in found):
        return False
    # Parts of equal total size that are pairwise disjoint fill the whole; sorted, only neighbours in the first
    # dimension can overlap, which keeps thousands of slices of one dimension cheap.
    found.sort()
    for index, box in enumerate(found):
        for other in found[index + 1 :]:
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
    """Its first byte within the file."""
    xxh3_128: str
    """Hexadecimal, of its bytes."""


class SlicedTensor(msgspec.Struct, frozen=True):
    """A sharded tensor."""

    file: str
    """The name of its file in the folder of each rank, which is the tensor's file in its reference."""
    key: str
    dtype: str
    """As torch calls it."""
    shape: tuple[_Offset, ...]
    slices: tuple[StoredSlice, ...]


def part_folder(rank: int) -> str:
    """``rank-00001`` for 1: the folder of a rank's part within the checkpoint's."""
    return f"{_FOLDER_PREFIX}{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank whose part the file `name`, as in ``rank-00001/model.safetensors``, is of; None if of no rank's."""
    folder, slash, _ = name.partition("/")
    number = folder.removeprefix(_FOLDER_PREFIX)
    return int(number) if slash and number != folder and number.isdigit() else None


def is_of_tensors(name: str) -> bool:
    """Whether the file `name` of a data folder has tensors that one rank wrote for all."""
    return name.endswith(".safetensors") and not name.startswith(f"{TRAINER_FOLDER}/") and rank_of(name) is None


def sliced_tensors(record: CheckpointRecord) -> list[SlicedTensor]:
    """The tensors that were saved in slices by several ranks; the index is proven, the slices not yet.

    Raises:
        BrokenCheckpointError: The index is missing, changed or malformed, or names bytes that no file has.
    """
    files = {record.file_name(entry): entry for entry in record.files}
    if SLICES_FILE not in files:
        return []
    sizes = {name: entry.size for name, entry in files.items()}
    return read_proven(record, files[SLICES_FILE], lambda data: parse_slices(data, sizes))


def parse_slices(data: bytes, sizes: Mapping[str, int]) -> list[SlicedTensor]:
    """The sharded tensors of an index.

    Args:
        data: The index, as `msgspec.json` encodes a list of them.
        sizes: Of the checkpoint's files, by name.

    Raises:
        ValueError: It is none, slices do not make a tensor whole, or a file does not have their bytes.
        RecursionError: It is nested too deeply.
    """
    tensors = msgspec.convert(parse_json(data), list[SlicedTensor])
    for tensor in tensors:
        boxes, element = [each.box for each in tensor.slices], _element_bytes(tensor.dtype)
        dimensions = {len(tensor.shape), *(len(part) for box in boxes for part in (box.offset, box.shape))}
        ranks = {each.rank for each in tensor.slices}
        if element is None or len(dimensions) > 1 or dimensions == {0} or len(ranks) < len(boxes):
            raise ValueError(f"it does not say what {tensor.key!r} is")
        if not tile_exactly(tensor.shape, boxes):
            raise ValueError(f"the slices of {tensor.key!r} do not make it whole")
        for each in tensor.slices:
            size = each.box.size * element
            if not size or each.begin + size > sizes.get(f"{part_folder(each.rank)}/{tensor.file}", 0):
                raise ValueError(f"no file has the bytes that {tensor.key!r} needs of rank {each.rank}")
    return tensors


def _typed_shape(tensor: SlicedTensor) -> TypedShape:
    """As a header would describe it if it were whole in one file."""
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
    """Compare a reference to a tensor with what is stored, and return that, with the type of the reference.

    Args:
        reference: As the state tree has it.
        stored: What the files hold.

    Raises:
        ValueError: It is malformed, or the file has other bytes.
    """
    facts = msgspec.convert(reference, TensorReference)
    where = f"{facts.file}:{facts.key}"
    found = stored.get((facts.file, facts.key))
    if found is None:
        raise ValueError(f"there is no tensor {where}")
    shape = list(found.shape) if facts.dtype is None else facts.shape or []
    element = _ELEMENT_BYTES[found.dtype] if facts.dtype is None else _element_bytes(facts.dtype)
    if element is None:  # as no type that this module knows, but perhaps this torch
        element = dtype_of(facts.dtype or "").itemsize
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {shape}")
    if math.prod(shape) * element != found.nbytes:
        raise ValueError(f"{where} has {found.nbytes} bytes, but its reference needs {math.prod(shape) * element}")
    if facts.stride is not None and not is_dense(shape, facts.stride):
        raise ValueError(f"the strides of {where} leave its bytes, or name some of them twice")
    if (facts.requires_grad or facts.parameter) and (facts.dtype or found.dtype) in _WHOLE_NUMBERS:
        raise ValueError(f"{where} holds whole numbers, which have no gradient")
    return found if facts.dtype is None else TypedShape(facts.dtype, tuple(shape), found.data_offsets)


def _element_bytes(dtype: str) -> int | None:
    """Size of an element of a torch type; None for one that is not known here."""
    return _ELEMENT_BYTES.get(TORCH_TYPES.get(dtype, dtype))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their range without gaps or repetition, in whatever order of dimensions."""
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
    """The content of the state file, what the files hold, and which of that lies there in slices.

    Args:
        record: Of the checkpoint.
        read: Reads a file of tensors and returns its header.

    Raises:
        BrokenCheckpointError: One is missing or malformed, or two files have the same tensor.
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
            raise BrokenCheckpointError(record.name, f"it does not say what {left.key!r} is that it leaves out")
        size = math.prod(left.shape) * _ELEMENT_BYTES[left.dtype]
        stored[MODEL_FILE, left.key] = TypedShape(left.dtype, left.shape, (0, size))
    return content, stored, sliced
