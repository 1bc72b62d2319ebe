"""Which part of a sharded tensor a rank holds, and which parts together make the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .lazy_tensor import HeldSlices, WholeTensor, unsharded

__all__ = [
    "Box",
    "Held",
    "from_slice",
    "held_by_this_rank",
    "is_sharded",
    "make_whole",
    "sharded_like",
    "slice_of",
]


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: where it begins and how large it is, in elements, for each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """What two parts of one tensor have in common; None for nothing."""
        begins = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, shape) if all(size > 0 for size in shape) else None

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last element in each dimension."""
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))

    def within(self, tensor: torch.Tensor, of: Box) -> torch.Tensor:
        """The view of this part in `tensor`, which is the part `of` of the same whole."""
        for dimension, (begin, size) in enumerate(zip(self.offset, self.shape, strict=True)):
            tensor = tensor.narrow(dimension, begin - of.offset[dimension], size)
        return tensor


def make_whole(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
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


@dataclass(frozen=True)
class Held:
    """The part of a sharded tensor that this rank holds."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    is_saved_here: bool
    """False on ranks whose part is a copy of another rank's."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the ranks hold parts of `tensor`, so that each can save its own."""
    placements = _placements(tensor)
    return any(type(place) is Shard for place in placements) and all(
        type(place) in (Shard, Replicate) for place in placements
    )


def held_by_this_rank(tensor: torch.Tensor) -> Held:
    """This rank's part of a tensor that `is_sharded`."""
    slices = tensor.slices if isinstance(tensor, WholeTensor) else HeldSlices(cast("DTensor", tensor))
    assert isinstance(slices, HeldSlices)
    sharded = slices.tensor
    coordinate = sharded.device_mesh.get_coordinate()
    is_first_copy = coordinate is not None and all(
        at == 0 for at, place in zip(coordinate, sharded.placements, strict=True) if type(place) is Replicate
    )
    return Held(slices.local, tuple(sharded.shape), slice_of(sharded), is_first_copy and slices.local.numel() > 0)


def slice_of(sharded: DTensor) -> Box:
    """Where this rank's part of `sharded` lies."""
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return Box(tuple(offset), tuple(shape))


def sharded_like(value: torch.Tensor, parameter: DTensor) -> DTensor:
    """The values of `value`, which has the shape of `parameter`, sharded as that is; each rank takes its own slice."""
    if isinstance(value, WholeTensor) and value.is_as_saved:
        return value.slices.like(parameter)
    value = unsharded(value)
    if not is_sharded(parameter):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    part = slice_of(parameter)
    return from_slice(part.within(value, of=Box((0,) * value.dim(), tuple(value.shape))).clone(), parameter)


def from_slice(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """A sharded tensor like `parameter`, of which this rank has the part `local`."""
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _placements(tensor: torch.Tensor) -> Sequence[object]:
    if isinstance(tensor, DTensor):
        return tuple(tensor.placements)
    if isinstance(tensor, WholeTensor) and isinstance(tensor.slices, HeldSlices) and tensor.is_as_saved:
        return tuple(tensor.slices.tensor.placements)
    return ()
