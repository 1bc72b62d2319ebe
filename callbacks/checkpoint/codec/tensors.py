"""The tensors of a state tree: their places in files, shared memory, bytes and digests.

A tensor that occurs again, with the same memory, shape and strides, is stored once and is again one tensor after
loading. Other views of the same memory are stored with separate values. A tensor of the model always has a separate
entry, so that ``model.safetensors`` is complete for other tools.

The entry of a sharded tensor is a slice: the part of it that this rank holds.

Bytes in host memory are hashed there (xxh3-128), at about the speed at which memory is read. Bytes on another device
stay there: the device computes two 64-bit sums over their words, after mixing each word with its position, and returns
16 bytes per tensor. A single changed word always changes the first sum; a change of several words is missed in one case
in about 2**128.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
import xxhash
from torch._utils import _flatten_dense_tensors

from ....adapter.contract.exceptions import UnstorableStateError
from ..format.headers import RAW, TORCH_TYPES, build_header
from ..format.record import MODEL_FILE, TENSORS_FILE, build_json
from ..format.slice_index import Box, SlicedTensor
from ..sharded.slices import is_saved_by_this_rank, is_sharded, slice_of, unsharded
from .references import is_dense
from .state_tree import Path, encode, format_path, is_plain_key

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


WEIGHTS = ("checkpoint", "state_dict")
"""Path of the model's tensors in a checkpoint, by their names."""
_KINDS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Torch's own classes of plain tensors."""


@dataclass(frozen=True)
class Entry:
    """Facts about one stored tensor."""

    file: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    """Number of bytes in the file."""
    device: torch.device
    """The device of the values before the save."""
    box: Box | None = None
    """Its position in a sharded tensor, if it is only this rank's slice of one."""

    @property
    def stored_as(self) -> tuple[str, tuple[int, ...]]:
        """Element type and shape in the file; element types that the format does not know are stored as bytes."""
        name = _name_of(self.dtype)
        return (TORCH_TYPES[name], self.shape) if name in TORCH_TYPES else (RAW, (self.nbytes,))


def entry_of(file: str, key: str, values: torch.Tensor, box: Box | None = None) -> Entry:
    """Return the facts of `values`."""
    return Entry(file, key, values.dtype, tuple(values.shape), values.nbytes, values.device, box)


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors with the same parent in the tree."""

    begin: int
    """Number of tensors before them in the walk."""
    paths: list[Path]
    keys: list[Any]
    json: msgspec.Raw
    """The encoded dictionary of these tensors."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Everything about the tensors of a tree except their values."""

    facts: tuple[Any, ...]
    """Everything that determines the other fields."""
    references: list[dict[str, Any]]
    """One for each tensor of the tree, in the order of the walk."""
    entries: list[Entry]
    stored: list[int]
    """Positions in the walk of the tensors whose values `entries` store."""
    groups: dict[Path, _Group]
    """By the path of the parent."""


class TensorTable:
    """Collects the tensors to write while a tree is encoded.

    Args:
        earlier: The layout of an earlier tree. If this tree has the same layout, which `settle` checks, the walk takes
            a tenth of the time and makes no objects for the garbage collector to visit.
    """

    def __init__(self, earlier: Layout | None = None) -> None:
        self.layout = earlier
        """The layout of the tree, after `settle`."""
        self.entries: list[Entry] = []
        """Tensors, and the slices of sharded ones that this rank holds."""
        self.sources: list[torch.Tensor] = []
        """The values of `entries`, on any device."""
        self.sharded_tensors: dict[tuple[str, str], SlicedTensor] = {}
        """All sharded tensors, by file and key, without their slices."""
        self._tensors: list[torch.Tensor] = []
        self._paths: list[Path] = []
        self._stored: list[int] = []
        self._keys: set[tuple[str, str]] = set()
        self._returned: list[dict[str, Any]] = []
        self._references: dict[Any, dict[str, Any]] = {}
        """References by the memory of their tensors."""

    def add_tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        """Return a reference to `tensor` as JSON. A tensor of the model keeps its name, in the model's file."""
        number = len(self._tensors)
        self._tensors.append(tensor)
        self._paths.append(path)
        if self.layout is not None:
            return self.layout.references[number] if number < len(self.layout.references) else {}
        reference = {"$tensor": self._add(tensor, path)}
        self._returned.append(reference)
        return reference

    def repeat(self, items: dict[Any, Any], path: Path) -> msgspec.Raw | None:
        """Return the JSON of a dictionary if the earlier tree had tensors of the same names here.

        `settle` checks later that the values are tensors again.
        """
        group = None if self.layout is None else self.layout.groups.get(path)
        if group is None or group.begin != len(self._tensors) or group.keys != list(items):
            return None
        self._tensors += items.values()
        self._paths += group.paths
        return group.json

    def settle(self) -> bool:
        """End the walk; return whether its references are right. If not, walk again with a table without `earlier`."""
        facts, earlier = _facts_of(self._tensors, self._paths), self.layout
        if earlier is None:
            groups = _groups_of(self._paths, self._returned)
            self.layout = None if facts is None else Layout(facts, self._returned, self.entries, self._stored, groups)
        elif facts == earlier.facts:
            self.entries = earlier.entries
            stored = map(self._tensors.__getitem__, earlier.stored)
            self.sources = [tensor.detach() if tensor.requires_grad else tensor for tensor in stored]
        else:
            return False
        return True

    def _add(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        """Return the content of a reference to `tensor`; add its values unless they were added before."""
        file, key = TENSORS_FILE, ""
        if path[:-1] == WEIGHTS and type(path[-1]) is str:
            file, key = MODEL_FILE, path[-1]
        box, has_values = None, True
        if is_sharded(tensor):
            sharded = cast("DTensor", tensor.detach())
            values, box, has_values = sharded.to_local(), slice_of(sharded), is_saved_by_this_rank(sharded)
        else:
            values = unsharded(tensor)
            if not is_plain(values):
                kind = f"{type(values).__module__}.{type(values).__qualname__}"
                hint = "store a dense copy, or the tensors it consists of; one on the meta device has no values"
                raise UnstorableStateError(format_path(path), kind, hint)
        values = values.detach().resolve_conj().resolve_neg()
        memory = (values.device, values.data_ptr() or path, values.shape, values.stride(), values.dtype, box)
        if memory not in self._references or file == MODEL_FILE:
            key = key or self._free_key(file, path)
            self._keys.add((file, key))
            if has_values:
                self.entries.append(entry_of(file, key, values, box))
                self.sources.append(values)
                self._stored.append(len(self._tensors) - 1)
            new: dict[str, Any] = {"file": file, "key": key}
            if (name := _name_of(values.dtype)) not in TORCH_TYPES:
                new |= {"dtype": name, "shape": list(tensor.shape)}
            if box is not None:
                self.sharded_tensors[file, key] = SlicedTensor(file, key, name, tuple(tensor.shape), ())
            elif not values.is_contiguous() and is_dense(values.shape, values.stride()):
                new["stride"] = list(values.stride())
            self._references.setdefault(memory, new)
        reference = dict(self._references[memory])
        if tensor.requires_grad:
            reference["requires_grad"] = True
        if isinstance(tensor, torch.nn.Parameter):
            reference["parameter"] = True
        return reference

    def _free_key(self, file: str, path: Path) -> str:
        """Return a key in `file` that no other tensor has, made from the path of a tensor."""
        parts = path[1:] if path[0] == "checkpoint" else path
        key = candidate = ".".join(map(str, parts))
        number = 1
        while (file, candidate) in self._keys:
            number += 1
            candidate = f"{key}#{number}"
        return candidate


def _groups_of(paths: list[Path], references: list[dict[str, Any]]) -> dict[Path, _Group]:
    """Return the tensors by parent, in the order of the walk; a parent with keys that need an encoding is skipped."""
    groups = {}
    for path, members in itertools.groupby(range(len(paths)), lambda number: paths[number][:-1]):
        numbers = list(members)
        keys = [paths[number][-1] for number in numbers]
        if all(map(is_plain_key, keys)):
            json = build_json({key: references[number] for key, number in zip(keys, numbers, strict=True)})
            groups[path] = _Group(numbers[0], [paths[number] for number in numbers], keys, msgspec.Raw(json))
    return groups


def _facts_of(tensors: list[torch.Tensor], paths: list[Path]) -> tuple[Any, ...] | None:
    """Return everything that determines the layout of `tensors` in files; None if one is not a plain dense tensor.

    One pass for each fact is several times as fast as one pass for all.
    """
    kinds = list(map(type, tensors))
    if not set(kinds) <= _KINDS or {tensor.layout for tensor in tensors} != {torch.strided}:
        return None
    if any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        return None  # these are stored as resolved copies, which share no memory
    shapes = [tensor.shape for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors]
    devices = [tensor.device for tensor in tensors]
    gradients = [tensor.requires_grad for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    shared: list[int] = []
    if len(set(addresses)) < len(addresses):
        first: dict[Any, int] = {}
        memory = zip(addresses, shapes, strides, dtypes, devices, strict=True)
        shared = [first.setdefault(at, number) if at[0] else number for number, at in enumerate(memory)]
    return paths, kinds, shapes, strides, dtypes, devices, gradients, shared


@dataclass(frozen=True, eq=False)
class TensorFile:
    """The content of a file of tensors, or of a rank's file of slices."""

    name: str
    is_part: bool
    """Whether it holds slices."""
    header: bytes
    entries: Sequence[Entry]
    sources: Sequence[torch.Tensor]
    memory: torch.Tensor | None = None
    """All values in the order of the file, as bytes, if they are contiguous in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(entry.nbytes for entry in self.entries)

    def with_memory(self, memory: torch.Tensor) -> TensorFile:
        """Return the same file with room for its values in `memory`, of `nbytes` bytes."""
        ends = list(itertools.accumulate(entry.nbytes for entry in self.entries))
        places = zip([0, *ends], ends, self.entries, strict=False)
        views = [memory[begin:end].view(entry.dtype).view(entry.shape) for begin, end, entry in places]
        return replace(self, sources=views, memory=memory)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes of all values at once if they are contiguous; of slices, one by one, for their digests."""
        if self.memory is None or self.is_part:
            yield from map(bytes_of, self.sources)
        else:
            yield bytes_of(self.memory)

    def runs(self) -> Iterator[torch.Tensor]:
        """Yield tensors with the values of `sources`; if they are contiguous, one tensor for neighbors of one type."""
        if self.memory is None:
            yield from self.sources
            return
        end = 0
        for dtype, group in itertools.groupby(self.entries, key=lambda entry: entry.dtype):
            begin, end = end, end + sum(entry.nbytes for entry in group)
            yield self.memory[begin:end].view(dtype)


def tensor_files(entries: Sequence[Entry], sources: Sequence[torch.Tensor]) -> list[TensorFile]:
    """Return the files of `entries`. Large elements come first in each, so that all are aligned."""
    order = sorted(range(len(entries)), key=lambda index: _place_of(entries[index]))
    files = []
    for (name, is_part), group in itertools.groupby(order, key=lambda index: _place_of(entries[index])[:2]):
        indices = list(group)
        some = [entries[index] for index in indices]
        header = build_header((entry.key, *entry.stored_as, entry.nbytes) for entry in some)
        files.append(TensorFile(name, is_part, header, some, [sources[index] for index in indices]))
    return files


def _place_of(entry: Entry) -> tuple[str, bool, int, str]:
    return entry.file, entry.box is not None, -entry.dtype.itemsize, _name_of(entry.dtype)


def restore_flags(tensor: torch.Tensor, reference: dict[str, Any]) -> torch.Tensor:
    """Return the stored `tensor` with the flags of `reference`: a parameter, or a tensor that requires a gradient."""
    requires_grad = reference.get("requires_grad", False)
    if reference.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.detach().requires_grad_(requires_grad)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """Return torch's name for an element type, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, of torch's own class, and has values."""
    is_dense = type(tensor) in _KINDS and tensor.layout == torch.strided
    return is_dense and not (tensor.is_quantized or tensor.is_meta)


def bytes_of(source: torch.Tensor) -> memoryview:
    """Return the values of a tensor, in row-major order, as bytes.

    A view of the source's memory for a contiguous tensor on the host; otherwise a copy of this one tensor.
    """
    if source.numel() == 0:
        return memoryview(b"")
    # `numpy()` would make the storage impossible to resize, and observers of torch.ao resize their buffers.
    return np.from_dlpack(as_uint8(source.cpu().contiguous())).data


def as_uint8(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as a flat tensor of bytes."""
    # A single element counts as contiguous with any stride; `reshape` would keep that, and `view` would refuse it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_CHUNK = 1 << 22
"""Words that are mixed at once: the sums need memory of the device for a few times this number."""
_WORTH_THREADS = 16 << 20
"""Bytes of host memory that are worth starting threads."""
_ODD = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Multipliers of SplitMix64 (Steele, Lea and Flood, 2014), as signed numbers."""
_LOW_BITS = {shift: (1 << (64 - shift)) - 1 for shift in (27, 30, 31)}


def content_digests(sources: Sequence[torch.Tensor]) -> list[str]:
    """Return a text for each tensor, equal for equal types, shapes and bytes on the same kind of device.

    Waits for each device once.
    """
    digest_of: dict[int, str] = {}
    places: dict[torch.device, list[int]] = {}
    for index, source in enumerate(sources):
        places.setdefault(source.device, []).append(index)
    for device, indices in places.items():
        there = [sources[index] for index in indices]
        digests = _host_digests(there) if device.type == "cpu" else _device_digests(there)
        digest_of |= zip(indices, digests, strict=True)
    return [f"{source.dtype} {list(source.shape)} {digest_of[index]}" for index, source in enumerate(sources)]


def _host_digests(sources: Sequence[torch.Tensor]) -> list[str]:
    """Hash in as many threads as torch may use, if the data is worth it: hashing releases the interpreter lock."""
    threads = min(torch.get_num_threads(), len(sources))
    if threads < 2 or sum(source.nbytes for source in sources) < _WORTH_THREADS:
        return [_host_digest(source) for source in sources]
    with ThreadPoolExecutor(threads, thread_name_prefix="genlight-digest") as pool:
        return list(pool.map(_host_digest, sources))


def _host_digest(source: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bytes_of(source.detach().resolve_conj().resolve_neg()))


def _device_digests(sources: Sequence[torch.Tensor]) -> list[str]:
    """Return the digests of tensors on one device."""
    read = torch.stack([device_digest(source) for source in sources]).tolist()
    kind = sources[0].device.type
    return [f"{kind}:{first % 2**64:016x}{second % 2**64:016x}" for first, second in read]


@torch.no_grad()
def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return two 64-bit sums over a dense tensor's words and their positions, on its device, without synchronizing."""
    words = _words(tensor)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK]
        places = torch.arange(begin + 1, begin + 1 + len(part), dtype=torch.int64, device=part.device)
        mixed = _mix(part ^ _mix(places * _ODD[0]))
        sums[0] += mixed.sum()
        sums[1] += _mix(mixed ^ places).sum()
    return sums


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer, a bijection of words."""
    words = (words ^ _shift_right(words, 30)) * _ODD[1]
    words = (words ^ _shift_right(words, 27)) * _ODD[2]
    return words ^ _shift_right(words, 31)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right without the sign."""
    return (words >> bits) & _LOW_BITS[bits]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 64-bit words; the last one may be padded with zeros."""
    octets = as_uint8(tensor.detach().resolve_conj().resolve_neg().contiguous())
    if octets.numel() % 8 == 0 and octets.storage_offset() % 8 == 0:
        return octets.view(torch.int64)
    padded = octets.new_zeros(-(-octets.numel() // 8) * 8)
    padded[: octets.numel()] = octets
    return padded.view(torch.int64)


SMALL_BYTES = 64 * 1024
"""Tensors up to this size are concatenated before they are hashed, because a call costs more than the copy."""


@torch.no_grad()
def digest_of_all(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a 64-bit digest of the bits, types and shapes of `tensors`, on `device`, without synchronizing.

    Tensors of the same type and shape are hashed together, in their order; in another order they have another digest.
    NaNs count by their bits. Tensors on the host are hashed there, at about memory speed, and tensors on a device on
    that device.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(tensor)
    pieces = _pieces(alike.values())
    on_host = [piece for piece in pieces if piece.device.type == "cpu"]
    kinds = [f"{len(some)} {dtype} {list(shape)} " for (_, dtype, shape), some in alike.items()]
    text = xxhash.xxh3_64_intdigest("".join([*kinds, *content_digests(on_host)]).encode()) - 2**63
    # `full` launches a kernel; a copy from the host would synchronize.
    number = torch.full((1,), text, dtype=torch.int64, device=device)
    numbers = [device_digest(piece).to(device) for piece in pieces if piece.device.type != "cpu"]
    return device_digest(torch.cat([number, *numbers]))[0] if numbers else number[0]


def _pieces(alike: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the large tensors, and concatenations of the small ones.

    Args:
        alike: Lists of tensors of the same device, type and shape. One call copies all small ones of a list. If the
            result is still small, it is concatenated with others of the same device and type.
    """
    large: list[torch.Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for some in alike:
        for piece in [torch.stack(some)] if len(some) > 1 and some[0].nbytes <= SMALL_BYTES else some:
            if piece.nbytes > SMALL_BYTES:
                large.append(piece)
            else:
                small.setdefault((piece.device, piece.dtype), []).append(piece)
    flat: list[torch.Tensor] = [_flatten_dense_tensors(some) for some in small.values()]  # type: ignore[no-untyped-call]
    return large + [piece.resolve_conj().resolve_neg() for piece in flat]


def is_storable(value: Any) -> bool:
    """Return whether a checkpoint can store `value`; see `encode`."""
    try:
        encode(value, TensorTable())
    except UnstorableStateError:
        return False
    return True
