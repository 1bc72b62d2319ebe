"""A copy of tensors into host memory that is reused from one save to the next.

Copying into memory that was touched before takes a third of the time of copying into fresh memory, whose pages the
kernel has to find and clear. For tensors of an accelerator the memory is pinned, so that the copies run at the speed of
the bus and need one synchronisation for all.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....adapter.plumbing.text import size_text
from ..codec.tensor_table import Entry

__all__ = ["ALIGNMENT", "HostBuffer"]

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Every tensor of a snapshot starts at a multiple of this many bytes."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of this process."""
LARGEST_PINNED = 0.5
"""Share of the machine's memory that is pinned at most: the system cannot take pinned pages back."""


class HostBuffer:
    """One block of host memory that holds the last snapshot."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._made_for = "cpu"
        """The kind of device that copies fast to this memory."""
        self._is_registered = False
        """Whether CUDA was told of it."""
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._targets: list[torch.Tensor] = []
        """The parts of the memory that take tensors of `_layout`: most snapshots are like the one before."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Hold at least `nbytes` for copies from `device`, and touch them, so that the next copy finds them warm."""
        if nbytes <= self.nbytes and device.type in ("cpu", self._made_for):
            return
        self._release()
        self._memory, self._made_for = torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), device.type
        if device.type != "cpu" and nbytes:
            self._pin(device)

    def copy(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries with their values as of now, in this buffer; valid until the next call."""
        tensors = [entry.source for entry in entries if not isinstance(entry.source, np.ndarray)]
        devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
        targets = self._laid_out(tensors, next(iter(devices), torch.device("cpu")))
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor, non_blocking=not tensor.is_cpu)
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        copies = iter(targets)
        return [_with(e, e.source.copy() if isinstance(e.source, np.ndarray) else next(copies)) for e in entries]

    def _laid_out(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """A part of the memory for each of `tensors`, of its type and shape."""
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.reserve(total, device)
        if layout != self._layout:
            parts = zip(tensors, offsets, strict=True)
            self._targets = [_like(tensor, self._memory[at : at + tensor.nbytes]) for tensor, at in parts]
            self._layout = layout
        return self._targets

    def _release(self) -> None:
        """Free the memory before other memory is taken."""
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._layout, self._targets, self._made_for, self._is_registered = [], [], "cpu", False
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __del__(self) -> None:
        if self._is_registered:  # or CUDA would take these pages for pinned when they belong to something else
            self._release()

    def _pin(self, device: torch.device) -> None:
        """Pin the memory for `device`; it stays as it is where that is too much, or refused.

        CUDA is told of just these bytes: torch's own pinned memory is rounded up to a power of two, and kept for good.
        """
        nbytes, most = self.nbytes, int(LARGEST_PINNED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        told = size_text(nbytes)
        if nbytes > most:
            log.info("Snapshots of %s are taken in pageable memory: at most %s are pinned", told, size_text(most))
            return
        try:
            runtime: Any = torch.cuda.cudart() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            if hasattr(runtime, "cudaHostRegister"):
                self._register(runtime, device)
            else:
                self._memory = self._memory.pin_memory()
        except Exception as error:  # noqa: BLE001 - without it copies are slower, and training goes on
            log.warning("Snapshots of %s are taken in pageable memory, which is slower: %s", told, error)
        else:
            log.info("%s of host memory are pinned for snapshots of checkpoints", told)

    def _register(self, runtime: Any, device: torch.device) -> None:
        with torch.cuda.device(device):
            code = int(runtime.cudaHostRegister(self._memory.data_ptr(), self.nbytes, _PORTABLE))
            self._is_registered = code == 0
            if code:
                with contextlib.suppress(RuntimeError):  # else the next kernel of the training would report it
                    torch.zeros(1, device=device)
                raise RuntimeError(f"cudaHostRegister returned {code}")


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`memory` as a tensor with the type and shape of `tensor`."""
    if not memory.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return memory.view(tensor.dtype).view(tensor.shape)


def _with(entry: Entry, source: torch.Tensor | np.ndarray[Any, Any]) -> Entry:
    """`entry` with other values; `dataclasses.replace` would take longer than the copy of a small tensor."""
    return Entry(entry.file, entry.key, entry.dtype, entry.shape, entry.nbytes, source, entry.slice)
