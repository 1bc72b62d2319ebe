"""Sharded tensors: which part of one a rank holds, and reading any part of it from the slices that ranks saved.

While a checkpoint is saved or loaded, most code hands tensors on without looking at them: a trainer's ``state_dict``
returns what its modules gave it, its ``load_state_dict`` passes it back. When one is saved these are the sharded
tensors themselves, of which each rank saves its slice. When one is loaded it is a `WholeTensor`, which has the shape of
the whole tensor, and reads a rank's slice alone where it meets a sharded tensor of that shape. Any other use reads all
of it, once. Just the bytes that are read are proven.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_flatten, tree_map

from ....adapter.contract.exceptions import BrokenCheckpointError
from ....adapter.plumbing.safe_open import open_regular
from ..codec.tensor_bytes import element_type
from ..format.record import CheckpointRecord
from ..format.tensor_files import BLOCK, PART_FILE, SliceEntry, parse_part, rank_of
from ..storage.files import read_proven

__all__ = [
    "Box",
    "Piece",
    "StoredSlices",
    "WholeTensor",
    "is_saved_by_this_rank",
    "is_sharded",
    "keep_sharded",
    "make_whole",
    "pieces_of",
    "sharded_like",
    "slice_of",
    "stored_slices",
    "unsharded",
    "whole",
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


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the ranks hold parts of `tensor`, so that each can save its own."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return any(type(place) is Shard for place in placements) and all(
        type(place) in (Shard, Replicate) for place in placements
    )


def is_saved_by_this_rank(sharded: DTensor) -> bool:
    """Whether this rank has a part of `sharded` that is not empty, and no copy of another rank's."""
    coordinate = sharded.device_mesh.get_coordinate()
    is_first_copy = coordinate is not None and all(
        at == 0 for at, place in zip(coordinate, sharded.placements, strict=True) if type(place) is Replicate
    )
    return is_first_copy and sharded.to_local().numel() > 0


def slice_of(sharded: DTensor) -> Box:
    """Where this rank's part of `sharded` lies."""
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return Box(tuple(offset), tuple(shape))


def sharded_like(value: torch.Tensor, parameter: DTensor) -> DTensor:
    """The values of `value`, which has the shape of `parameter`, sharded as that is; each rank takes its own slice."""
    if isinstance(value, WholeTensor):
        return value.sharded_like(parameter)
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


class WholeTensor(torch.Tensor):
    """A tensor whose slices are in the files of a checkpoint until its values are used."""

    slices: StoredSlices
    _plain: torch.Tensor | None

    @staticmethod
    def __new__(cls: type[WholeTensor], slices: StoredSlices) -> WholeTensor:
        """A tensor with the shape, type and device of the whole, and no memory."""
        made: WholeTensor = torch.Tensor._make_wrapper_subclass(
            cls, slices.shape, dtype=slices.dtype, device=torch.device("cpu")
        )
        return made

    def __init__(self, slices: StoredSlices) -> None:
        self.slices = slices
        self._plain = None

    def put_together(self) -> torch.Tensor:
        """The values as a plain tensor; the same one each time, so that a change in place is not lost."""
        if self._plain is None:
            self._plain = self.slices.whole()
        return self._plain

    def sharded_like(self, parameter: DTensor) -> DTensor:
        """The values sharded as `parameter` is; where that can be, only this rank's slice is read."""
        if self._plain is None and is_sharded(parameter):
            return from_slice(self.slices.read(slice_of(parameter)), parameter)
        return sharded_like(self.put_together(), parameter)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WholeTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _with_values(func, args, kwargs or {})


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` with plain tensors, or, beside a sharded tensor of the same shape, with slices like its."""
    sharded = {tuple(item.shape): item for item in tree_flatten((args, kwargs))[0] if isinstance(item, DTensor)}

    def usable(item: Any) -> Any:
        if not isinstance(item, WholeTensor):
            return item
        partner = sharded.get(tuple(item.shape))
        return item.put_together() if partner is None else item.sharded_like(partner)

    args, kwargs = tree_map(usable, (args, kwargs))
    return func(*args, **kwargs)


_T = torch.Tensor
_ASKS_NO_VALUE = {
    *(
        getattr(_T, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf")
    ),
    *(getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_nested", "is_sparse", "is_quantized")),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.__hash__, _T.__len__),
    *(_T.is_floating_point, _T.is_complex, torch.is_floating_point, torch.is_complex),
}

_keeps_sharded: contextvars.ContextVar[bool] = contextvars.ContextVar("genlight_keeps_sharded", default=False)


@contextlib.contextmanager
def keep_sharded() -> Iterator[None]:
    """While this is open, `whole` gathers nothing."""
    token = _keeps_sharded.set(True)
    try:
        yield
    finally:
        _keeps_sharded.reset(token)


def whole(value: Any) -> Any:
    """The whole tensor where `value` is sharded, else `value` itself; within `keep_sharded` always that."""
    return value.full_tensor() if isinstance(value, DTensor) and not _keeps_sharded.get() else value


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a plain one; gathered where it has to be."""
    if isinstance(tensor, WholeTensor):
        return tensor.put_together()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Piece:
    """One saved slice."""

    checkpoint: str
    path: Path
    entry: SliceEntry

    @property
    def box(self) -> Box:
        """Where it lies in the whole."""
        return Box(self.entry.offset, self.entry.shape)

    def read(self, part: Box) -> torch.Tensor:
        """A part of this slice; only its rows are read.

        Raises:
            BrokenCheckpointError: A byte differs from what was saved.
        """
        entry, first, rows = self.entry, part.offset[0] - self.entry.offset[0], part.shape[0]
        row_bytes = entry.size // entry.shape[0]
        data = self._read_proven(first * row_bytes, (first + rows) * row_bytes)
        read = Box((part.offset[0], *entry.offset[1:]), (rows, *entry.shape[1:]))
        return part.within(data.view(element_type(entry.dtype)).view(read.shape), of=read)

    def _read_proven(self, begin: int, end: int) -> torch.Tensor:
        """Bytes of this slice, whose blocks are compared with their digests."""
        first, last = begin // BLOCK, -(-end // BLOCK)
        start, stop = first * BLOCK, min(last * BLOCK, self.entry.size)
        buffer = bytearray(stop - start)
        view = memoryview(buffer)
        descriptor = open_regular(self.path)
        try:
            filled = 0
            while filled < len(buffer):
                count = os.preadv(descriptor, [view[filled:]], self.entry.begin + start + filled)
                if not count:
                    raise BrokenCheckpointError(self.checkpoint, f"{self._name} ends early")
                filled += count
        finally:
            os.close(descriptor)
        for block in range(first, last):
            at = block * BLOCK - start
            if xxhash.xxh3_128_hexdigest(view[at : at + BLOCK]) != self.entry.blocks[block]:
                raise BrokenCheckpointError(
                    self.checkpoint, f"{self._name} is not what was saved for {self.entry.key} (block {block})"
                )
        return torch.frombuffer(buffer, dtype=torch.uint8)[begin - start : end - start].clone()

    @property
    def _name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


def pieces_of(record: CheckpointRecord) -> dict[tuple[str, str], list[Piece]]:
    """All saved slices by file and key of their tensor; the indices of the parts are proven, the slices not yet.

    Raises:
        BrokenCheckpointError: An index is missing, changed or malformed, or names a file that the record does not.
    """
    found: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    files = {record.file_name(file): file for file in record.files}
    for name, file in files.items():
        folder, _, base = name.rpartition("/")
        if rank_of(name) is None or base != PART_FILE:
            continue
        try:
            entries = parse_part(read_proven(record, file))
        except (ValueError, KeyError, TypeError) as error:
            raise BrokenCheckpointError(record.name, f"{file.path} is malformed: {error}") from error
        for entry in entries:
            holder = files.get(f"{folder}/{entry.file}")
            if holder is None:
                raise BrokenCheckpointError(record.name, f"{file.path} names {entry.file}, which the record does not")
            if not _fits(entry, holder.size):
                raise BrokenCheckpointError(record.name, f"{file.path} does not hold the bytes that {entry.key} needs")
            found[entry.file, entry.key].append(Piece(record.name, record.path.parent / holder.path, entry))
    return found


def _fits(entry: SliceEntry, file_bytes: int) -> bool:
    """Whether a slice has the bytes that its shape needs, within its file."""
    try:
        needed = math.prod(entry.shape) * element_type(entry.dtype).itemsize
    except ValueError:
        return False
    return entry.size == needed and entry.begin + entry.size <= file_bytes


@dataclass(frozen=True)
class StoredSlices:
    """A sharded tensor of a checkpoint; its values are read when they are asked for."""

    pieces: Sequence[Piece]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def whole(self) -> torch.Tensor:
        """All of it, put together from all slices."""
        return self.read(Box((0,) * len(self.shape), self.shape))

    def read(self, part: Box) -> torch.Tensor:
        """The values of one part as they were saved.

        Raises:
            BrokenCheckpointError: They differ from what was saved.
        """
        result = torch.empty(part.shape, dtype=self.dtype, device="cpu")
        for piece in self.pieces:
            common = piece.box.overlap(part)
            if common is not None:
                common.within(result, of=part).copy_(piece.read(common))
        return result


def stored_slices(checkpoint: str, pieces: Sequence[Piece], shape: Sequence[int], dtype: str) -> StoredSlices:
    """The sharded tensor that `pieces` make.

    Raises:
        BrokenCheckpointError: They do not make it whole.
    """
    if not make_whole(shape, [piece.box for piece in pieces]) or any(piece.entry.dtype != dtype for piece in pieces):
        name = pieces[0].entry.key if pieces else "a sharded tensor"
        raise BrokenCheckpointError(checkpoint, f"the slices of {name} do not make it whole")
    return StoredSlices(tuple(pieces), tuple(shape), element_type(dtype))
