"""The capture of a checkpoint: the state taken apart into JSON and tensors, and a copy of the tensors of one moment.

Runs in the training thread and touches no disk, but for links of frozen weights. `CheckpointStore` writes what was
captured.

A copy goes into host memory that is reused from one save to the next. Copying into memory that was touched before takes
a third of the time of copying into fresh memory, whose pages the kernel has to find and clear. For tensors of an
accelerator the memory is pinned, so that the copies run at the speed of the bus and need one synchronisation for all.

Frozen weights are parameters that require no gradient and that no optimizer holds, as the start of training finds them.
They are written once in an attempt. Each later checkpoint has a hard link to that file, so that its folder is whole by
itself: it can be removed, copied or moved without a look at the others. A file system without hard links gets them with
every checkpoint. With ``weights="trained"`` they are left out, as long as they are what the class builds: the record
says what their bytes were, and a resume takes them from the module, and from no other bytes than those. At each save
their bytes are compared with those of the start. Version counters would not do: those miss writes through
``tensor.data``, with which many a class moves its averaged copy of the weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from ...adapter.contract.exceptions import CheckpointError, UnstorableStateError
from ...adapter.plumbing.text import size_text
from ..finite import are_finite
from ..optimizer_state import parameters_of
from .codec.state_tree import encode
from .codec.tensor_bytes import as_uint8, bytes_of, content_digests
from .codec.tensor_table import WEIGHTS, Entry, Slice, TensorTable, is_plain, stored_as
from .format.record import FROZEN_FILE, MODEL_FILE, CheckpointRecord, LeftOut, RecordMeta
from .format.tensor_files import RAW
from .storage import STATE_MARKER, Staging, naming_the_checkpoint, stage

__all__ = [
    "ALIGNMENT",
    "CONTRACT_KEY",
    "Captured",
    "Frozen",
    "HostBuffer",
    "base_of",
    "capture",
    "described",
    "finite_weights",
    "frozen_in",
    "link",
    "left_out_tensors",
    "require_base",
    "snapshot",
]

log = logging.getLogger(__name__)

CONTRACT_KEY = "genlight"
"""The member of a Lightning checkpoint that holds what the trainer contract adds; its ``state`` is the payload."""

_WEIGHTS = WEIGHTS[1]


@dataclass(frozen=True)
class FrozenFile:
    """A durable file of frozen tensors, which later checkpoints link."""

    keys: frozenset[str]
    size: int
    xxh3_128: str
    path: Path
    identity: tuple[int, int, int]
    """Inode, bytes and time of change, when it became durable."""


@dataclass
class Captured:
    """A checkpoint that was taken apart and is not written yet."""

    meta: RecordMeta
    step: int
    state: Any
    """The trainer's payload, encoded; it goes into the record."""
    rest: bytes
    """Everything else that is not a tensor; the content of the state file."""
    entries: list[Entry]
    slices: list[Entry] = field(default_factory=list)
    """The slices of sharded tensors that this rank holds."""
    sharded_tensors: dict[tuple[str, str], Slice] = field(default_factory=dict)
    """All sharded tensors, by file and key."""
    staging: Staging | None = None
    """Where it is made; holds the files of the trainer's own hook, and the link to `linked`."""
    linked: FrozenFile | None = None
    """The file of an earlier checkpoint that this one shares."""
    earlier: FrozenFile | None = None
    """A file of an earlier attempt, which is shared where what is written turns out to have the same bytes."""
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that will be written, about."""
        return len(self.rest) + sum(entry.nbytes for entry in (*self.entries, *self.slices))


def capture(checkpoint: Mapping[str, Any], meta: RecordMeta, staging: Staging | None = None) -> Captured:
    """Take a checkpoint apart into JSON and tensors; its tensors are referred to, not copied.

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
    _check_json(meta.trainer_checkpoint)
    entries = sorted(table.entries, key=lambda entry: entry.file)
    step = meta.step if meta.step is not None else int(checkpoint.get("global_step", 0))
    metadata = encode(getattr(checkpoint.get(_WEIGHTS), "_metadata", None), table, root="state_dict._metadata")
    content = {"format_version": 1, "weights_metadata": metadata, "checkpoint": {"$dict": list(encoded.items())}}
    state_file = STATE_MARKER + b"," + json.dumps(content, separators=(",", ":"), allow_nan=False)[1:].encode()
    return Captured(meta, step, state, state_file, entries, table.slices, table.sharded_tensors, staging)


def snapshot(captured: Captured, buffer: HostBuffer) -> Captured:
    """`captured` with the values of now, in `buffer`; what is written once, frozen tensors, gets memory of its own."""
    once = [entry for entry in captured.entries if entry.file == FROZEN_FILE]
    again = [entry for entry in captured.entries if entry.file != FROZEN_FILE]
    copies, count = buffer.copy([*again, *captured.slices]), len(again)
    own = [replace(entry, source=entry.source.detach().to("cpu", copy=True)) for entry in once]
    return replace(captured, entries=own + copies[:count], slices=copies[count:])


def finite_weights(captured: Captured) -> bool | None:
    """Whether all parameters that this rank holds are finite; None where it cannot tell them from buffers.

    An infinite buffer is nothing unusual: a mask is one.
    """
    slices = [entry.source for entry in captured.slices if entry.file == MODEL_FILE]
    entries = [entry for entry in captured.entries if entry.file in (MODEL_FILE, FROZEN_FILE)]
    if not are_finite(slices):
        return False
    if _are_finite(entries):  # what is linked or left out was finite from the start
        return True if entries or slices or captured.linked or captured.left_out else None
    names = captured.meta.parameters
    return _are_finite(entry for entry in entries if entry.key in names) if names else None


def _are_finite(entries: Iterable[Entry]) -> bool:
    return are_finite([entry.source for entry in entries])


def _check_json(value: Mapping[str, Any] | None) -> None:
    """Check the result of the hook, which goes into the record as it is, where orchestrators read it."""
    if value is None:
        return
    try:
        json.dumps({**value, "primary_path": str(value.get("primary_path"))}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnstorableStateError("save_checkpoint()", f"{type(value).__name__} ({error})", "return JSON") from None


_LEAST_BYTES = 4096
"""Fewer bytes are written again: a file and a link take as much."""
_NAMED = 5


def frozen_in(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """By name, the finite parameters of `module` that require no gradient and that none of `optimizers` holds."""
    held = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    parameters = module.named_parameters(remove_duplicate=False)
    found: dict[str, torch.Tensor] = {
        name: p for name, p in parameters if not p.requires_grad and id(p) not in held and is_plain(p)
    }
    is_worth_it = sum(p.nbytes for p in found.values()) >= _LEAST_BYTES
    return found if is_worth_it and are_finite([p.detach() for p in found.values()]) else {}


class Frozen:
    """The frozen weights of a training, from one checkpoint to the next.

    Args:
        tensors: What `frozen_in` found, at the start.
        base: Those that checkpoints leave out where they are as here; None writes them.
        earlier: The newest checkpoint that an earlier attempt of the run has left.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        base: Mapping[str, LeftOut] | None = None,
        earlier: CheckpointRecord | None = None,
    ) -> None:
        self._digests = dict(zip(tensors, content_digests(list(tensors.values())), strict=True))
        now = {} if base is None else described(tensors)
        self._left_out = {key: left for key, left in now.items() if base is not None and base.get(key) == left}
        self._file: FrozenFile | None = None
        self._earlier = None if earlier is None else _file_of(earlier, frozenset())

    def divide(self, captured: Captured, record: Path) -> Captured:
        """`captured` with its frozen weights set apart: left out, linked from the last checkpoint, or in one file.

        Raises:
            UnwrittenCheckpointError: The folder of the checkpoint could not be made.
        """
        asked = {e.key: e for e in captured.entries if e.file == MODEL_FILE and e.key in self._digests}
        digests = content_digests([entry.source for entry in asked.values()])
        same = {key for key, digest in zip(asked, digests, strict=True) if digest == self._digests[key]}
        left_out = [left for key, left in self._left_out.items() if key in same]
        keys = frozenset(same) - {left.key for left in left_out}
        linked, staging = None, captured.staging
        if self._file is not None and keys == self._file.keys:
            with naming_the_checkpoint(record, captured.nbytes):
                staging = staging or stage(record)
                # At once, while it is there for certain.
                linked = self._file if link(self._file, staging.path / FROZEN_FILE) else None
        gone = same if linked is not None else same - keys
        entries = [e for e in captured.entries if e.file != MODEL_FILE or e.key not in gone]
        entries = [replace(e, file=FROZEN_FILE) if e.file == MODEL_FILE and e.key in keys else e for e in entries]
        return replace(
            captured,
            entries=sorted(entries, key=lambda entry: entry.file),
            staging=staging,
            linked=linked,
            earlier=self._earlier if self._file is None else None,
            left_out=left_out,
        )

    def learn(self, record: CheckpointRecord, captured: Captured) -> None:
        """Take note of the file of `record`, which is durable: the next checkpoint links it."""
        written = frozenset(entry.key for entry in captured.entries if entry.file == FROZEN_FILE)
        keys = captured.linked.keys if captured.linked is not None else written
        self._file = _file_of(record, keys)


def link(file: FrozenFile, target: Path) -> bool:
    """Make `target` a hard link to `file`; False where that is not possible, so that it has to be written again."""
    try:
        os.link(file.path, target, follow_symlinks=False)
    except OSError:  # gone, no links here, too many of them, or not allowed to this user
        return False
    if _identity_of(target) == file.identity:
        return True
    os.unlink(target)
    return False


def _file_of(record: CheckpointRecord, keys: frozenset[str]) -> FrozenFile | None:
    entry = next((entry for entry in record.files if record.file_name(entry) == FROZEN_FILE), None)
    path = record.path.parent / (entry.path if entry else "")
    if entry is None or not path.is_file():
        return None
    return FrozenFile(keys, entry.size, entry.xxh3_128, path, _identity_of(path))


def _identity_of(path: Path) -> tuple[int, int, int]:
    """Inode, bytes and time of change: what a file still has that nobody has replaced or written to."""
    status = os.lstat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def base_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name, the tensors of `module` from which a checkpoint may take what it leaves out."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, LeftOut]:
    """The entries of a record for tensors that it leaves out; none for those that this process does not hold whole."""
    return {
        key: LeftOut(key, *stored_as(tensor), xxhash.xxh3_128_hexdigest(bytes_of(tensor.detach())))
        for key, tensor in tensors.items()
        if is_plain(tensor)
    }


def left_out_tensors(record: CheckpointRecord, base: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """The tensors that `record` leaves out, copied from `base` and proven; as a file would hold them.

    Raises:
        CheckpointError: `base` lacks one, or has another; names it, with both digests, and the way out.
    """
    require_base(record, base)
    found = {}
    for left in record.left_out:
        given = (base or {}).get(left.key)
        host = None if given is None else given.detach().to("cpu", copy=True).contiguous()
        now = None if host is None else described({left.key: host}).get(left.key)
        if host is None or now != left:
            has = "does not have it" if host is None else "has a part of it" if now is None else f"has {_text_of(now)}"
            raise CheckpointError(
                f"{record.name} goes with another base: {left.key} was {_text_of(left)}, and the module {has}. It was "
                "saved with weights='trained' and leaves that out; build the module, unsharded, with the base that it "
                "was trained with, or begin a new run"
            )
        found[left.key] = as_uint8(host) if left.dtype == RAW and host.dtype != torch.uint8 else host
    return found


def _text_of(left: LeftOut) -> str:
    return f"{left.dtype} {list(left.shape)} with the digest {left.xxh3_128}"


def require_base(record: CheckpointRecord, base: Mapping[str, Any] | None) -> None:
    """Raise where `record` leaves tensors out and there is no `base` to take them from.

    Raises:
        CheckpointError: Says which, and what to do.
    """
    if record.left_out and base is None:
        names = ", ".join(entry.key for entry in record.left_out[:_NAMED])
        more = ", …" if len(record.left_out) > _NAMED else ""
        raise CheckpointError(
            f"{record.name} leaves out {len(record.left_out)} tensors ({names}{more}), which training did not change, "
            "because it was saved with weights='trained'. Resume it in a Trainer with the Checkpoint callback, whose "
            "module has them; else give them as `base`: load(path, base=module.state_dict()), or `genlight checkpoints "
            "export PATH --to FILE --base FILE.safetensors`"
        )


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
        """Whether it is registered with the device's runtime."""
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
        tensors = [entry.source for entry in entries]
        devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
        targets = self._laid_out(tensors, next(iter(devices), torch.device("cpu")))
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor, non_blocking=not tensor.is_cpu)
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return list(map(_with, entries, targets))

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
            _runtime_of(self._made_for).cudaHostUnregister(self._memory.data_ptr())
        self._layout, self._targets, self._made_for, self._is_registered = [], [], "cpu", False
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __del__(self) -> None:
        if self._is_registered:  # or CUDA would take these pages for pinned when they belong to something else
            self._release()

    def _pin(self, device: torch.device) -> None:
        """Pin the memory for `device`; it stays as it is where that is too much, or refused.

        Just these bytes are registered with CUDA: torch's own pinned memory is rounded up to a power of two, and kept
        for good.
        """
        nbytes, most = self.nbytes, int(LARGEST_PINNED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        size = size_text(nbytes)
        if nbytes > most:
            log.info("Snapshots of %s are taken in pageable memory: at most %s are pinned", size, size_text(most))
            return
        try:
            runtime = _runtime_of(device.type)
            if hasattr(runtime, "cudaHostRegister"):
                self._register(runtime, device)
            else:
                self._memory = self._memory.pin_memory()
        except Exception as error:  # noqa: BLE001 - without it copies are slower, and training goes on
            log.warning("Snapshots of %s are taken in pageable memory, which is slower: %s", size, error)
        else:
            log.info("%s of host memory are pinned for snapshots of checkpoints", size)

    def _register(self, runtime: Any, device: torch.device) -> None:
        with torch.get_device_module(device).device(device):
            code = int(runtime.cudaHostRegister(self._memory.data_ptr(), self.nbytes, _PORTABLE))
            self._is_registered = code == 0
            if code:
                with contextlib.suppress(RuntimeError):  # else the next kernel of the training would report it
                    torch.zeros(1, device=device)
                raise RuntimeError(f"cudaHostRegister returned {code}")


def _runtime_of(kind: str) -> Any:
    """The part of a device's module that has CUDA's own calls, on AMD's devices too; None where there is none."""
    make = getattr(torch.get_device_module(kind), "cudart", None)
    return None if make is None else make()


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`memory` as a tensor with the type and shape of `tensor`."""
    if not memory.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return memory.view(tensor.dtype).view(tensor.shape)


def _with(entry: Entry, source: torch.Tensor) -> Entry:
    """`entry` with other values; `dataclasses.replace` would take longer than the copy of a small tensor."""
    return Entry(entry.file, entry.key, entry.dtype, entry.shape, entry.nbytes, source, entry.slice)
