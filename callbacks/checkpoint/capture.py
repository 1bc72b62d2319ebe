"""The capture of a checkpoint: the state taken apart into JSON and tensors, and a copy of the tensors at one moment.

Runs in the training thread and does not touch the disk. `CheckpointStore` writes the captured state.

A copy goes into host memory that is reused from one save to the next. Copying into memory that was touched before takes
a third of the time of copying into fresh memory, whose pages the kernel has to find and clear. For tensors of an
accelerator the memory is pinned, so that the copies run at the speed of the bus and need one synchronization for all.

If the user asks for it, large tensors in host memory are copied while training continues (`Overlap`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import logging
import multiprocessing.queues
import os
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...adapter.contract.exceptions import ThreadLimitError, UnstorableStateError
from ...adapter.plumbing.text import size_text
from ...adapter.plumbing.threads import carry_out, started
from ..finite import are_finite
from .codec.state_tree import encode
from .codec.tensors import WEIGHTS, Entry, Layout, TensorFile, TensorTable, tensor_files
from .format.record import FROZEN_FILE, MODEL_FILE, TRAINER_FOLDER, LeftOut, RecordMeta, build_json
from .format.slice_index import SlicedTensor
from .frozen import Frozen, FrozenFile
from .listing import STATE_MARKER
from .storage import Staging

log = logging.getLogger(__name__)

CONTRACT_KEY = "genlight"
"""Key of genlight's additions in a Lightning checkpoint.

Their ``state`` is the payload of the trainer class: the result of its ``state_dict``.
"""

_WEIGHTS = WEIGHTS[1]


@dataclass
class Captured:
    """A checkpoint that was taken apart and is not yet written."""

    meta: RecordMeta
    state: bytes
    """The payload of the trainer class, encoded as JSON; it goes into the record."""
    rest: bytes
    """Everything else that is not a tensor; the content of the state file."""
    entries: list[Entry]
    """Tensors, and the slices of sharded ones that this rank holds."""
    sources: list[torch.Tensor]
    """The values of `entries`."""
    sharded_tensors: dict[tuple[str, str], SlicedTensor]
    """All sharded tensors, by file and key, without their slices."""
    staging: Staging
    """The folder in which it is made; has the files of the hook ``save_checkpoint``, and the link to `linked`."""
    layout: Layout | None = None
    """The layout of its tensors, if a later checkpoint can have the same."""
    linked: FrozenFile | None = None
    """The file of an earlier checkpoint that this one shares."""
    left_out: list[LeftOut] = field(default_factory=list)
    files: Sequence[TensorFile] | None = None
    """The files of a snapshot of the tensors, complete once `overlap` has ended."""
    overlap: Overlap | None = None
    frozen: Frozen | None = None
    """The training's frozen weights, if its `divide` made `entries`; its `learn` gets the durable checkpoint."""

    def content(self) -> Sequence[TensorFile]:
        """Return the files of its tensors; if there is a snapshot, wait until it is complete and return its files."""
        if self.overlap is not None:
            self.overlap.result()
        return tensor_files(self.entries, self.sources) if self.files is None else self.files

    @property
    def nbytes(self) -> int:
        """Approximate number of bytes to write."""
        return len(self.rest) + sum(entry.nbytes for entry in self.entries)

    def select(self, condition: Callable[[Entry], bool]) -> Captured:
        """Return the same checkpoint with the tensors whose entries meet `condition`."""
        kept = [each for each in zip(self.entries, self.sources, strict=True) if condition(each[0])]
        return replace(self, entries=[entry for entry, _ in kept], sources=[source for _, source in kept])

    def snapshot(self, buffer: HostBuffer, overlap: Overlap) -> Captured:
        """Return a copy with the current values, in `buffer`; frozen tensors, usually copied once, get a new one."""
        parts = [(buffer, self)]
        if FROZEN_FILE in {entry.file for entry in self.entries}:
            once, again = self.select(lambda e: e.file == FROZEN_FILE), self.select(lambda e: e.file != FROZEN_FILE)
            parts = [(HostBuffer(), once), (buffer, again)]
        with _without_garbage_collection():
            files = [file for memory, part in parts for file in memory.copy(part.entries, part.sources, overlap)]
        overlap.start()
        return replace(self, sources=[], files=files, overlap=overlap)

    def has_finite_weights(self) -> bool | None:
        """Whether all parameters that this rank holds are finite; None if they cannot be told from buffers.

        Buffers may be infinite, for example a mask.
        """
        weights = [file for file in self.content() if file.name in (MODEL_FILE, FROZEN_FILE)]
        # Linked and omitted weights need no check: `frozen_in` takes only finite ones.
        if are_finite([run for file in weights for run in file.runs()]):
            return True if weights or self.linked or self.left_out else None
        names = self.meta.parameters
        tensors = (each for file in weights for each in zip(file.entries, file.sources, strict=True))
        known = [source for entry, source in tensors if entry.box is not None or entry.key in names]
        if not are_finite(known):
            return False
        return True if names else None


def capture(
    checkpoint: Mapping[str, Any], meta: RecordMeta, staging: Staging, earlier: Layout | None = None
) -> Captured:
    """Take a checkpoint apart into JSON and tensors; it refers to the tensors and does not copy them.

    Args:
        checkpoint: The state.
        meta: Further facts for the record.
        staging: The folder in which the checkpoint is made.
        earlier: The layout of an earlier checkpoint. If this one has the same, its names and references are reused.

    Raises:
        UnstorableStateError: A value cannot be stored; names its path.
    """
    with _without_garbage_collection():
        table = TensorTable(earlier)
        state, rest = _encode(checkpoint, table)
        if not table.settle():
            table = TensorTable()
            state, rest = _encode(checkpoint, table)
            table.settle()
    step = meta.step if meta.step is not None else int(checkpoint.get("global_step", 0))
    meta = replace(meta, step=step, trainer_checkpoint=_storable_result(meta.trainer_checkpoint, staging))
    return Captured(meta, state, rest, table.entries, table.sources, table.sharded_tensors, staging, table.layout)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Start no garbage collection in this block: a walk over many tensors makes enough objects to cause a full one."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _encode(checkpoint: Mapping[str, Any], table: TensorTable) -> tuple[bytes, bytes]:
    """Return the trainer's payload, and the content of the state file."""
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
    metadata = encode(getattr(checkpoint.get(_WEIGHTS), "_metadata", None), table, root="state_dict._metadata")
    content = {"format_version": 1, "weights_metadata": metadata, "checkpoint": {"$dict": list(encoded.items())}}
    return build_json(state), STATE_MARKER + b"," + build_json(content)[1:]


def _storable_result(result: Mapping[str, Any] | None, staging: Staging) -> Mapping[str, Any] | None:
    """Return the result of the ``save_checkpoint`` hook as it goes into the record, for orchestrators to read.

    A ``primary_path`` in the trainer's folder becomes relative to it, so that the folder can be renamed and moved.
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


class Overlap:
    """A copy of large tensors in host memory, made by a thread while training continues.

    `take` makes a lazy clone of a tensor, which shares its memory, and the thread copies the clone. If anything writes
    to the tensor meanwhile, through torch and by whatever name (an update, a load, an average, ``.data``, another
    view), torch first gives the tensor other memory. So the clone keeps the values of that moment, and the copy is
    consistent. Allocating the other memory takes longer than the copy. Therefore the next update of an optimizer, or
    the end of the step, waits for the thread. If other code writes to a tensor during the copy, later saves copy that
    tensor at once.

    A write without torch, to an address that was read earlier, would not be noticed. Therefore a tensor is copied at
    once if a NumPy array shares its memory, or if that memory belongs to a file, several processes or another library.

    No other thread may use a tensor while torch gives it other memory, or release its clone. So the training thread
    releases the clones, and no tensor is taken while other threads run code of the program.

    Args:
        written: Files and keys of tensors to copy at once, because something wrote to them during an earlier copy.
        is_allowed: Whether the user allows copies while training continues.
    """

    def __init__(self, written: Collection[tuple[str, str]] = (), *, is_allowed: bool = True) -> None:
        self.written = set(written)
        self.takes = is_allowed and not _runs_other_threads()
        """Whether `take` takes any tensor."""
        self.waited_s = 0.0
        """Seconds for which training waited."""
        self._entries: list[Entry] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._clones: list[torch.Tensor] = []
        self._copied: Future[None] = Future()
        self._copied.set_result(None)
        self._thread: threading.Thread | None = None
        self._hook: RemovableHandle | None = None

    def take(self, entry: Entry, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Copy the current values of `source` to `target` later, if that is safe; return whether it is."""
        if not self.takes or (entry.file, entry.key) in self.written:
            return False
        if not source.untyped_storage().resizable():  # a NumPy array may share the memory, and write to it unnoticed
            return False
        try:
            clone = torch._lazy_clone(source)
        except RuntimeError:  # torch did not allocate this memory
            return False
        self._entries.append(entry)
        self._targets.append(target)
        self._sources.append(source)
        self._clones.append(clone)
        return True

    def start(self) -> None:
        """Start the copy. If the system has no room for a thread, copy in the calling thread."""
        if not self._clones:
            return
        self._copied = Future()
        # One call for all tensors, because the thread waits for the interpreter after each call.
        job = functools.partial(carry_out, self._copied, lambda: torch._foreach_copy_(self._targets, self._clones))
        try:
            self._thread = started(threading.Thread(target=job, name="genlight-snapshot"))
        except ThreadLimitError:
            job()
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    def result(self) -> None:
        """Return when the copy is complete.

        Raises:
            Exception: It failed.
        """
        self._copied.result()

    def _before_update(self, *_: Any) -> None:
        if self._clones and not torch.compiler.is_compiling():
            self._release()

    def _release(self) -> None:
        """Wait for the copy, and note the tensors that something wrote to while it ran."""
        began_s = time.monotonic()
        if self._thread is not None:
            self._thread.join()  # returns at once in a forked process, which has no such thread
        self.waited_s += time.monotonic() - began_s
        shared = map(torch._C._is_cow_tensor, self._sources)  # type: ignore[attr-defined]
        self.written |= {(e.file, e.key) for e, is_shared in zip(self._entries, shared, strict=True) if not is_shared}
        self._clones.clear()
        for source in self._sources:
            source.data_ptr()  # ends the sharing: from now on this is plain memory for any thread
        for others in (self._entries, self._targets, self._sources):
            others.clear()

    def end(self) -> None:
        """Return when the copy has ended; updates no longer wait for it. Called in the training thread."""
        if self._hook is not None:
            self._release()
            self._hook.remove()
            self._hook = None


_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
    str(Path(__file__).parents[2]),
    multiprocessing.queues.__file__,  # its threads send batches to data workers
)
"""Paths of installed packages and of genlight: threads of this code do not use the tensors of the training."""


def _runs_other_threads() -> bool:
    """Whether another thread may run code of the program itself, and so may use the tensors of the training.

    The answer depends on the function that each thread was started with. The frames of the threads would be exact, but
    in Python 3.11 ``sys._current_frames`` can deadlock: it may collect garbage while it holds a lock that an ending
    thread needs.
    """
    return any(
        not thread.name.startswith("genlight-") and not _file_of(thread).startswith(_LIBRARIES)
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
    )


def _file_of(thread: threading.Thread) -> str:
    """Return the file of the function that a thread runs; for a thread of a pool, that is a function of the pool."""
    function = type(thread).run
    with contextlib.suppress(AttributeError):  # its function has returned
        function = thread._target or function  # type: ignore[attr-defined]
    return str(getattr(getattr(function, "__code__", None), "co_filename", ""))


_ALIGNMENT = 64
"""Every file of a snapshot starts at a multiple of this many bytes."""
_SPARE = 1 << 20
"""Spare bytes, so that a later save with a little more than these tensors need not allocate the memory again."""
_LEAST_OVERLAPPED = 1 << 14
"""Minimum bytes of a tensor to copy in the background; a smaller tensor is copied faster at once."""
LARGEST_PINNED = 0.5
"""Largest share of the machine's memory to pin: the system cannot reclaim pinned pages."""


class HostBuffer:
    """One block of host memory that holds the last snapshot, laid out as its files."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._made_for = "cpu"
        """The kind of device from which copies to this memory are fast."""
        self._entries: Sequence[Entry] = ()
        """The tensors of the last snapshot; the next snapshot has the same layout if it has the same tensors."""
        self._devices: set[torch.device] = set()
        self._files: list[TensorFile] = []
        self._targets: list[torch.Tensor] = []
        """Places in the memory, in the order of the tensors."""
        self._large: list[int] = []
        """Numbers of the tensors that can be copied later."""

    @torch.no_grad()
    def copy(self, entries: Sequence[Entry], sources: list[torch.Tensor], overlap: Overlap) -> list[TensorFile]:
        """Return files with the current values of `sources`, in this buffer; valid until the next call.

        `overlap` copies the tensors that it can take. The files are complete once it has ended.
        """
        if entries != self._entries:
            self._lay_out(entries, sources)
        targets = self._targets
        candidates = self._large if overlap.takes else ()  # usually empty, to save a call for each of many tensors
        later = {n for n in candidates if overlap.take(entries[n], targets[n], sources[n])}
        if later:
            at_once = [number for number in range(len(entries)) if number not in later]
            targets, sources = [targets[number] for number in at_once], [sources[number] for number in at_once]
        if sources:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        return self._files

    def _lay_out(self, entries: Sequence[Entry], sources: Sequence[torch.Tensor]) -> None:
        """Give each file a part of the memory, in which its tensors follow each other without gaps."""
        files = tensor_files(entries, sources)
        ends = list(itertools.accumulate(-(-file.nbytes // _ALIGNMENT) * _ALIGNMENT for file in files))
        self._devices = {entry.device for entry in entries if entry.device.type != "cpu"}
        self._entries, self._files, self._targets = (), [], []
        self.reserve(ends[-1] if ends else 0, next(iter(self._devices), torch.device("cpu")))
        parts = [self._memory[end:][: file.nbytes] for end, file in zip([0, *ends], files, strict=False)]
        self._files = [file.with_memory(part) for file, part in zip(files, parts, strict=True)]
        places = {id(e): view for file in self._files for e, view in zip(file.entries, file.sources, strict=True)}
        self._targets = [places[id(entry)] for entry in entries]
        large = (n for n, entry in enumerate(entries) if entry.nbytes >= _LEAST_OVERLAPPED)
        self._large = [number for number in large if entries[number].device.type == "cpu"]
        self._entries = entries

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
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
