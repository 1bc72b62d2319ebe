"""The capture of a checkpoint: the state taken apart into JSON and tensors, and a copy of the tensors at one moment.

Runs in the training thread and does not touch the disk, except to link frozen weights. `CheckpointStore` writes the
captured state.

A copy goes into host memory that is reused from one save to the next. Copying into memory that was touched before takes
a third of the time of copying into fresh memory, whose pages the kernel has to find and clear. For tensors of an
accelerator the memory is pinned, so that the copies run at the speed of the bus and need one synchronization for all.

Frozen weights are parameters that require no gradient and that no optimizer holds at the start of training. They are
written once in a run. Each later checkpoint has a hard link to that file, so that its folder is self-contained: it can
be removed, copied or moved independently of the others. On a file system without hard links they are written with
every checkpoint. With ``weights="trained"`` they are omitted, as long as they equal those that the class builds: the
record has the digest of their bytes, and a resume takes them from the module only if its bytes are the same. At each
save their bytes are compared with those at the start. Version counters would not do: they miss writes through
``tensor.data``, with which many classes move their averaged copy of the weights.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from ...adapter.contract.exceptions import UnstorableStateError
from ...adapter.plumbing.text import size_text
from ..finite import are_finite
from ..optimizer_state import parameters_of
from .codec.state_tree import encode
from .codec.tensors import WEIGHTS, Entry, TensorTable, bytes_of, content_digests, is_plain
from .format.headers import build_header
from .format.record import FROZEN_FILE, MODEL_FILE, TRAINER_FOLDER, CheckpointRecord, LeftOut, RecordMeta, digest_of
from .format.slice_index import SlicedTensor, part_folder
from .storage import STATE_MARKER, Staging

log = logging.getLogger(__name__)

CONTRACT_KEY = "genlight"
"""Member of a Lightning checkpoint for the additions of the trainer contract; its ``state`` is the payload."""

_WEIGHTS = WEIGHTS[1]


@dataclass(frozen=True)
class FrozenFile:
    """A durable file of frozen tensors that later checkpoints link to."""

    keys: frozenset[str]
    size: int
    xxh3_128: str
    path: Path
    identity: tuple[int, int, int]
    """Inode, bytes and time of change, taken when it became durable."""


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


def tensor_files(entries: Iterable[Entry], rank: int = 0) -> Iterator[tuple[str, bytes, list[Entry]]]:
    """Yield the files of `entries`: name, header, and their entries, large elements first, so that all are aligned.

    Slices are in files of the same names in the folder of their `rank`.
    """

    def name(entry: Entry) -> str:
        return entry.file if entry.box is None else f"{part_folder(rank)}/{entry.file}"

    ordered = sorted(entries, key=lambda entry: (name(entry), -entry.source.dtype.itemsize))
    for file, group in itertools.groupby(ordered, key=name):
        some = list(group)
        yield file, build_header((e.key, *e.stored_as, e.nbytes) for e in some), some


_LEAST_BYTES = 4096
"""Fewer bytes than this are written again: a file and a link cost as much."""


def frozen_in(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return by name the finite parameters of `module` that require no gradient and that no optimizer holds."""
    held = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    parameters = module.named_parameters(remove_duplicate=False)
    frozen: dict[str, torch.Tensor] = {
        name: p for name, p in parameters if not p.requires_grad and id(p) not in held and is_plain(p)
    }
    is_worth_it = sum(p.nbytes for p in frozen.values()) >= _LEAST_BYTES
    return frozen if is_worth_it and are_finite([p.detach() for p in frozen.values()]) else {}


def describe_omitted(tensors: Mapping[str, torch.Tensor]) -> dict[str, LeftOut]:
    """Return the entries of a record for tensors that it omits; none for those that this process holds only in part."""
    return {
        key: LeftOut(key, *Entry(MODEL_FILE, key, tensor).stored_as, digest_of(bytes_of(tensor.detach())))
        for key, tensor in tensors.items()
        if is_plain(tensor)
    }


class Frozen:
    """The frozen weights of a training, from one checkpoint to the next.

    Args:
        tensors: The result of `frozen_in` at the start.
        leaves_out: Whether checkpoints omit weights that are unchanged since the class built them.
        loaded: The checkpoint that the training resumes from: only weights that it omits are as the class built them,
            and its file is shared if it has the same bytes.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, leaves_out: bool = False, loaded: CheckpointRecord | None = None
    ) -> None:
        self._digests = dict(zip(tensors, content_digests(list(tensors.values())), strict=True))
        self._left_out = describe_omitted(tensors) if leaves_out else {}
        self._file: FrozenFile | None = None
        if loaded is not None:
            built = set(loaded.left_out)
            self._left_out = {key: left for key, left in self._left_out.items() if left in built}
            stored = {key: tensor for key, tensor in tensors.items() if key not in self._left_out}
            file = _file_of(loaded, frozenset(stored))
            self._file = file if file is not None and _has_the_bytes(file, stored) else None

    def divide(self, captured: Captured) -> Captured:
        """Return `captured` with frozen weights separated: omitted, linked from the last checkpoint, or in a file."""
        present = {e.key: e for e in captured.entries if e.file == MODEL_FILE and e.key in self._digests}
        digests = content_digests([entry.source for entry in present.values()])
        same = {key for key, digest in zip(present, digests, strict=True) if digest == self._digests[key]}
        left_out = [left for key, left in self._left_out.items() if key in same]
        keys = frozenset(same - self._left_out.keys())
        linked = None
        if self._file is not None and keys == self._file.keys:
            # Link at once, while the file certainly exists.
            linked = self._file if _link(self._file, captured.staging.path / FROZEN_FILE) else None
        gone = same if linked is not None else same - keys
        entries = [e for e in captured.entries if e.file != MODEL_FILE or e.key not in gone]
        entries = [replace(e, file=FROZEN_FILE) if e.file == MODEL_FILE and e.key in keys else e for e in entries]
        return replace(captured, entries=entries, linked=linked, left_out=left_out, frozen=self)

    def learn(self, record: CheckpointRecord, captured: Captured) -> None:
        """Remember the file of the durable `record`: the next checkpoint links to it."""
        written = frozenset(entry.key for entry in captured.entries if entry.file == FROZEN_FILE)
        keys = captured.linked.keys if captured.linked is not None else written
        self._file = _file_of(record, keys)


def _link(file: FrozenFile, target: Path) -> bool:
    """Make `target` a hard link to `file`; return False if that fails, so that the file is written again."""
    with contextlib.suppress(OSError):  # the file is gone; links are not supported, too many, or not permitted
        os.link(file.path, target, follow_symlinks=False)
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
    """Return inode, bytes and time of change; they differ after a file was replaced or written to."""
    status = os.lstat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _has_the_bytes(file: FrozenFile, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether writing `tensors` would give the same bytes as `file`, whose digest was proven at the load."""
    hasher = xxhash.xxh3_128()
    for _, header, entries in tensor_files(Entry(FROZEN_FILE, key, each.detach()) for key, each in tensors.items()):
        hasher.update(header)
        for entry in entries:
            hasher.update(bytes_of(entry.source))
    return hasher.hexdigest() == file.xxh3_128


_ALIGNMENT = 64
"""Every tensor of a snapshot starts at a multiple of this many bytes."""
_SPARE = 1 << 20
"""Spare bytes, so that a later save with a little more than these tensors need not allocate the memory again."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of this process."""
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

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

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

    @staticmethod
    def room_for(sizes: Iterable[int]) -> int:
        """Return the bytes that tensors of these sizes take here together."""
        return sum(map(_aligned, sizes))

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Allocate at least `nbytes` for copies from `device`."""
        if nbytes <= self.nbytes and device.type in ("cpu", self._made_for):
            return
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # free it before allocating more
        self._memory = torch.zeros(nbytes + _SPARE if nbytes else 0, dtype=torch.uint8, device="cpu")
        self._made_for = device.type
        if device.type != "cpu" and nbytes:
            self._pin(device)

    def _pin(self, device: torch.device) -> None:
        """Pin the memory for `device`; leave it pageable if it is too large, or if pinning fails.

        Only these bytes are registered with CUDA: torch's own pinned memory is rounded up to a power of two, and never
        freed.
        """
        nbytes, most = self.nbytes, int(LARGEST_PINNED * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        size = size_text(nbytes)
        if nbytes > most:
            log.info("Snapshots of %s use pageable memory: at most %s may be pinned", size, size_text(most))
            return
        try:
            # A device's module has CUDA's own calls in this part, on AMD's devices too.
            runtime = getattr(torch.get_device_module(device), "cudart", lambda: None)()
            if hasattr(runtime, "cudaHostRegister"):
                self._register(runtime, device)
            else:
                self._memory = self._memory.pin_memory()
        except Exception as error:  # noqa: BLE001 - copies are slower without it, and training continues
            log.warning("Snapshots of %s use pageable memory, which is slower: %s", size, error)
        else:
            log.info("%s of host memory are pinned for snapshots of checkpoints", size)

    def _register(self, runtime: Any, device: torch.device) -> None:
        with torch.get_device_module(device).device(device):
            address = self._memory.data_ptr()
            code = int(runtime.cudaHostRegister(address, self.nbytes, _PORTABLE))
            if code:
                with contextlib.suppress(RuntimeError):  # otherwise the next kernel of the training would report it
                    torch.zeros(1, device=device)
                raise RuntimeError(f"cudaHostRegister returned {code}")
        # Otherwise CUDA would still consider these pages pinned when they belong to something else.
        weakref.finalize(self._memory, runtime.cudaHostUnregister, address).atexit = False


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the start of `memory` as a tensor with the type and shape of `tensor`."""
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _with_source(entry: Entry, source: torch.Tensor) -> Entry:
    """Return `entry` with other values; `dataclasses.replace` would take longer than copying a small tensor."""
    return Entry(entry.file, entry.key, source, entry.box)
