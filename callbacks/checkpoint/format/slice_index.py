"""Index of sharded tensors: the part of each tensor in each rank's files.

For each sharded tensor, ``slices.json`` lists the parts in ``rank-00001/*.safetensors``, the positions of their bytes,
and their digests, so that a rank reads and proves only the slices that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ....adapter.plumbing.text import parse_json
from .headers import Offset, element_bytes
from .record import TRAINER_FOLDER

SLICES_FILE = "slices.json"
_FOLDER_PREFIX = "rank-"


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: its offset and its shape, in elements for each dimension."""

    offset: tuple[Offset, ...]
    shape: tuple[Offset, ...]

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
    begin: Offset
    """Offset of its first byte in the file."""
    xxh3_128: str
    """Hexadecimal digest of its bytes."""


class SlicedTensor(msgspec.Struct, frozen=True):
    """A sharded tensor."""

    file: str
    """Name of its file in the folder of each rank; a reference to the tensor has the same name."""
    key: str
    dtype: str
    """Torch's name for the element type, such as ``float32``."""
    shape: tuple[Offset, ...]
    slices: tuple[StoredSlice, ...]


def part_folder(rank: int) -> str:
    """Return the folder of a rank's part within the checkpoint's: ``rank-00001`` for 1."""
    return f"{_FOLDER_PREFIX}{rank:05d}"


def rank_of(name: str) -> int | None:
    """Return the rank that wrote the file `name`, such as 1 for ``rank-00001/model.safetensors``, or None."""
    folder, slash, _ = name.partition("/")
    number = folder.removeprefix(_FOLDER_PREFIX)
    return int(number) if slash and number != folder and number.isdigit() else None


def is_of_tensors(name: str) -> bool:
    """Whether the file `name` of a data folder has tensors that rank zero wrote for all ranks."""
    return name.endswith(".safetensors") and not name.startswith(f"{TRAINER_FOLDER}/") and rank_of(name) is None


def parse_slices(data: bytes, sizes: Mapping[str, int]) -> list[SlicedTensor]:
    """Return the sharded tensors of an index.

    Args:
        data: The index: a list of `SlicedTensor` as JSON.
        sizes: Sizes of the checkpoint's files, by name.

    Raises:
        ValueError: It is not an index, slices do not tile a tensor, or a file does not have their bytes.
        RecursionError: It is nested too deeply.
    """
    tensors = msgspec.convert(parse_json(data), list[SlicedTensor])
    for tensor in tensors:
        boxes, element = [each.box for each in tensor.slices], element_bytes(tensor.dtype)
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
