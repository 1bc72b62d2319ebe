"""The capture of a checkpoint: the state taken apart into JSON and tensors, and a copy of the tensors at one moment.

Runs in the training thread and does not touch the disk. `CheckpointStore` writes the captured state.

A copy goes into host memory that is reused from one save to the next. Copying into memory that was touched before takes
a third of the time of copying into fresh memory, whose pages the kernel has to find and clear. For tensors of an
accelerator the memory is pinned, so that the copies run at the speed of the bus and need one synchronization for all.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...adapter.contract.exceptions import UnstorableStateError
from ...adapter.plumbing.text import size_text
from ..finite import are_finite
from .codec.state_tree import encode
from .codec.tensors import WEIGHTS, Entry, TensorTable
from .format.record import FROZEN_FILE, MODEL_FILE, TRAINER_FOLDER, LeftOut, RecordMeta
from .format.slice_index import SlicedTensor
from .frozen import Frozen, FrozenFile
from .listing import STATE_MARKER
from .storage import Staging

log = logging.getLogger(__name__)

CONTRACT_KEY = "genlight"
"""Member of a Lightning checkpoint for the additions of the trainer contract; its ``state`` is the payload."""

_WEIGHTS = WEIGHTS[1]


@dataclass
class Captured:
    """A checkpoint that was taken apart and is not yet written."""

    meta: RecordMeta
    state: Any
    """The trainer's payload, encoded; it goes into the record."""
    rest: bytes
    """Everything else that is not a tensor; the content of the state file."""
    entries: list[Entry]
    """Tensors, and the slices of sharded ones that this rank holds."""
    sharded_tensors: dict[tuple[str, str], SlicedTensor]
    """All sharded tensors, by file and key, without their slices."""
    staging: Staging
    """The folder in which it is made; holds the files of the trainer's own hook, and the link to `linked`."""
    linked: FrozenFile | None = None
    """The file of an earlier checkpoint that this one shares."""
    left_out: list[LeftOut] = field(default_factory=list)
    frozen: Frozen | None = None
    """The training's frozen weights, if they were separated; they remember the file once it is durable."""

    @property
    def nbytes(self) -> int:
        """Approximate number of bytes to write."""
        return len(self.rest) + sum(entry.nbytes for entry in self.entries)

    def snapshot(self, buffer: HostBuffer) -> Captured:
        """Return a copy with the current values, in `buffer`; frozen tensors, written once, get separate memory."""
        once = [entry for entry in self.entries if entry.file == FROZEN_FILE]
        again = [entry for entry in self.entries if entry.file != FROZEN_FILE]
        own = [_with_source(entry, entry.source.detach().to("cpu", copy=True)) for entry in once]
        return replace(self, entries=own + buffer.copy(again))

    def has_finite_weights(self) -> bool | None:
        """Whether all parameters that this rank holds are finite; None if it cannot tell them from buffers.

        An infinite buffer is not unusual: a mask is one.
        """
        weights = [entry for entry in self.entries if entry.file in (MODEL_FILE, FROZEN_FILE)]
        if are_finite([entry.source for entry in weights]):  # linked and omitted ones were finite from the start
            return True if weights or self.linked or self.left_out else None
        names = self.meta.parameters
        known = [entry.source for entry in weights if entry.box is not None or entry.key in names]
        if not are_finite(known):
            return False
        return True if names else None


def capture(checkpoint: Mapping[str, Any], meta: RecordMeta, staging: Staging) -> Captured:
    """Take a checkpoint apart into JSON and tensors; it refers to the tensors and does not copy them.

    Raises:
        UnstorableStateError: A value cannot be stored; names its path.
    """
    table = TensorTable()
    rest = {name: value for name, value in checkpoint.items() if name not in (_WEIGHTS, CONTRACT_KEY)}
    encoded = {}
    if _WEIGHTS in checkpoint:
        weights = checkpoint[_WEIGHTS]
        plain = dict(weights) if isinstance(weights, Mapping) else weights
        encoded[_WEIGHTS] = encode(plain, table, root=WEIGHTS)
    encoded |= {name: encode(value, table, root=("checkpoint", name)) for name, value in rest.items()}
    contract = dict(checkpoint.get(CONTRACT_KEY, {}))
    state = encode(contract.pop("state", {}), table, root="state")
    if CONTRACT_KEY in checkpoint:
        encoded[CONTRACT_KEY] = encode(contract, table, root=CONTRACT_KEY)
    step = meta.step if meta.step is not None else int(checkpoint.get("global_step", 0))
    meta = replace(meta, step=step, trainer_checkpoint=_storable_result(meta.trainer_checkpoint, staging))
    metadata = encode(getattr(checkpoint.get(_WEIGHTS), "_metadata", None), table, root="state_dict._metadata")
    content = {"format_version": 1, "weights_metadata": metadata, "checkpoint": {"$dict": list(encoded.items())}}
    state_file = STATE_MARKER + b"," + json.dumps(content, separators=(",", ":"), allow_nan=False)[1:].encode()
    return Captured(meta, state, state_file, table.entries, table.sharded_tensors, staging)


def _storable_result(result: Mapping[str, Any] | None, staging: Staging) -> Mapping[str, Any] | None:
    """Return the result of the hook as it goes into the record, for orchestrators to read.

    Its ``primary_path`` is changed to stay valid after the folder gets its name, or is moved.
    """
    if result is None:
        return None
    named = result.get("primary_path")
    if isinstance(named, (str, os.PathLike)):
        path, output = Path(named), (staging.path / TRAINER_FOLDER).absolute()
        result = {**result, "primary_path": str(path.relative_to(output) if path.is_relative_to(output) else path)}
    try:
        json.dumps(dict(result), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnstorableStateError("save_checkpoint()", f"{type(result).__name__} ({error})", "return JSON") from None
    return result


_ALIGNMENT = 64
"""Every tensor of a snapshot starts at a multiple of this many bytes."""
_SPARE = 1 << 20
"""Spare bytes, so that a later save with a little more than these tensors need not allocate the memory again."""
LARGEST_PINNED = 0.5
"""Largest share of the machine's memory to pin: the system cannot reclaim pinned pages."""


def _aligned(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes in a snapshot."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostBuffer:
    """One block of host memory that holds the last snapshot."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._made_for = "cpu"
        """The kind of device from which copies to this memory are fast."""

    def copy(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries with their current values, in this buffer; valid until the next call."""
        tensors = [entry.source for entry in entries]
        devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
        offsets = [0, *itertools.accumulate(_aligned(tensor.nbytes) for tensor in tensors)]
        self.reserve(offsets[-1], next(iter(devices), torch.device("cpu")))
        targets = [_like(tensor, self._memory[at:]) for tensor, at in zip(tensors, offsets, strict=False)]
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor, non_blocking=not tensor.is_cpu)
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return list(map(_with_source, entries, targets))

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Allocate at least `nbytes` for copies from `device`: pinned for an accelerator, if that is possible."""
        if nbytes <= self._memory.numel() and device.type in ("cpu", self._made_for):
            return
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # free it before allocating more
        self._memory = _allocate(nbytes + _SPARE, pinned=device.type != "cpu")
        self._made_for = device.type


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return host memory; it is pageable if too much of the machine's memory would be pinned, or if pinning fails."""
    taken = 1 << (nbytes - 1).bit_length()  # torch rounds pinned memory up to a power of two
    most = int(LARGEST_PINNED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if pinned and taken > most:
        log.info("Snapshots of %s use pageable memory: at most %s may be pinned", size_text(nbytes), size_text(most))
    elif pinned:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:  # copies are slower without it, and training continues
            log.warning("Snapshots of %s use pageable memory, which is slower: %s", size_text(nbytes), error)
        else:
            log.info("%s of host memory are pinned for snapshots of checkpoints", size_text(taken))
            return memory
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the start of `memory` as a tensor with the type and shape of `tensor`."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _with_source(entry: Entry, source: torch.Tensor) -> Entry:
    """Return `entry` with other values; `dataclasses.replace` would take longer than copying a small tensor."""
    return Entry(entry.file, entry.key, source, entry.box)
