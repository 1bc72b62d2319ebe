"""Reading any part of a sharded tensor from the slices that ranks saved, and proving just the bytes that are read."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch.distributed.tensor import DTensor, distribute_tensor

from ....adapter.contract.exceptions import BrokenCheckpointError
from ....adapter.plumbing.safe_open import open_regular
from ..codec.tensor_bytes import element_type
from ..format.record import CheckpointRecord
from ..format.shard_index import BLOCK, PART_FILE, SliceEntry, parse_part, rank_of
from ..format.verification import read_proven
from .boxes import Box, from_slice, is_sharded, make_whole, slice_of
from .lazy_tensor import Change

__all__ = ["Piece", "StoredSlices", "pieces_of", "stored_slices"]


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
    saved_dtype: torch.dtype
    change: Change = lambda tensor: tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements once they are read."""
        return self._sample.dtype

    @property
    def device(self) -> torch.device:
        """Where they are put."""
        return self._sample.device

    def whole(self) -> torch.Tensor:
        """All of it, put together from all slices."""
        return self.change(self.read(Box((0,) * len(self.shape), self.shape)))

    def like(self, parameter: DTensor) -> DTensor:
        """Only this rank's slice, where `parameter` has it."""
        if not is_sharded(parameter):
            return distribute_tensor(self.whole().to(parameter.device), parameter.device_mesh, parameter.placements)
        return from_slice(self.change(self.read(slice_of(parameter))), parameter)

    def changed(self, change: Change) -> StoredSlices:
        """The same slices, each of which goes through `change` when it is read."""
        before = self.change
        return replace(self, change=lambda tensor: change(before(tensor)))

    def read(self, part: Box) -> torch.Tensor:
        """The values of one part as they were saved.

        Raises:
            BrokenCheckpointError: They differ from what was saved.
        """
        result = torch.empty(part.shape, dtype=self.saved_dtype, device="cpu")
        for piece in self.pieces:
            common = piece.box.overlap(part)
            if common is not None:
                common.within(result, of=part).copy_(piece.read(common))
        return result

    @property
    def _sample(self) -> torch.Tensor:
        return self.change(torch.empty(0, dtype=self.saved_dtype, device="cpu"))


def stored_slices(checkpoint: str, pieces: Sequence[Piece], shape: Sequence[int], dtype: str) -> StoredSlices:
    """The sharded tensor that `pieces` make.

    Raises:
        BrokenCheckpointError: They do not make it whole.
    """
    if not make_whole(shape, [piece.box for piece in pieces]) or any(piece.entry.dtype != dtype for piece in pieces):
        name = pieces[0].entry.key if pieces else "a sharded tensor"
        raise BrokenCheckpointError(checkpoint, f"the slices of {name} do not make it whole")
    return StoredSlices(tuple(pieces), tuple(shape), element_type(dtype))
