"""A copy of tensors into host memory that is reused from one save to the next.

Copying into memory that was touched before takes a third of the time of copying into fresh memory, whose pages the
kernel has to find and clear; for tensors of a CUDA device the memory is pinned, so that the copies run at the speed of
the bus and need one synchronisation for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..codec.tensor_table import Entry

__all__ = ["ALIGNMENT", "HostBuffer"]

ALIGNMENT = 64
"""Every tensor of a snapshot starts at a multiple of this many bytes."""


class HostBuffer:
    """One block of host memory that holds the last snapshot."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._targets: list[torch.Tensor] = []
        """The parts of the memory that take tensors of `_layout`: most snapshots are like the one before."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    def reserve(self, nbytes: int, *, pinned: bool = False) -> None:
        """Hold at least `nbytes` and touch them, so that the next copy finds them warm."""
        if nbytes <= self.nbytes and (self._memory.is_pinned() or not pinned):
            return
        self._layout, self._targets = [], []
        self._memory = torch.empty(
            0, dtype=torch.uint8, device="cpu"
        )  # The old block is freed before the new one is made.
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def copy(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries with their values as of now, in this buffer; valid until the next call."""
        tensors = [entry.source for entry in entries if not isinstance(entry.source, np.ndarray)]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        targets = self._laid_out(tensors, pinned=bool(devices))
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)
        copies = iter(targets)
        return [_with(e, e.source.copy() if isinstance(e.source, np.ndarray) else next(copies)) for e in entries]

    def _laid_out(self, tensors: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        """A part of the memory for each of `tensors`, of its type and shape."""
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.reserve(total, pinned=pinned)
        if layout != self._layout:
            parts = zip(tensors, offsets, strict=True)
            self._targets = [_like(tensor, self._memory[at : at + tensor.nbytes]) for tensor, at in parts]
            self._layout = layout
        return self._targets


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`memory` as a tensor with the type and shape of `tensor`."""
    if not memory.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return memory.view(tensor.dtype).view(tensor.shape)


def _with(entry: Entry, source: torch.Tensor | np.ndarray[Any, Any]) -> Entry:
    """`entry` with other values; `dataclasses.replace` would take longer than the copy of a small tensor."""
    return Entry(entry.file, entry.key, entry.dtype, entry.shape, entry.nbytes, source, entry.slice)
