"""The tensors and arrays of a state tree: what is written where, and which of them share memory.

Tensors that share memory in the process share it again after loading: they refer to one stored tensor, some as views
of it. A tensor of the model always has an entry of its own, so that ``model.safetensors`` is complete for other tools.

A tensor that is sharded over the ranks has no entry, but a slice: the part of it that this rank holds.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ....adapter.contract.exceptions import UnstorableStateError
from ..format.record import ARRAYS_FILE, MODEL_FILE, TENSORS_FILE
from ..format.tensor_files import RAW, TORCH_TYPES
from ..sharded.slices import Box, is_saved_by_this_rank, is_sharded, slice_of, unsharded
from .state_tree import Attribute, Path, format_path

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["WEIGHTS", "Entry", "Slice", "TensorTable", "refuse_unknown", "stored_as"]

WEIGHTS = ("checkpoint", "state_dict")
"""Where a checkpoint has the model's tensors, by their names."""
_LARGEST_ELEMENT = 16
"""Bytes of a ``complex128``."""


@dataclass(eq=False)
class Entry:
    """One stored tensor or array; `source` still has its values, on whatever device."""

    file: str
    key: str
    dtype: str
    """The element type in the file."""
    shape: tuple[int, ...]
    nbytes: int
    source: Any
    """A contiguous tensor, or a C-contiguous array."""
    slice: Slice | None = None
    """Where it is only a part of a tensor."""


@dataclass(frozen=True)
class Slice:
    """What an entry is a part of."""

    box: Box
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """As torch calls it."""


@dataclass(eq=False)
class _Use:
    """One occurrence of a tensor in the tree."""

    tensor: torch.Tensor
    reference: dict[str, Any]
    file: str
    key: str
    begin: int
    """First byte within the storage."""
    end: int

    @property
    def geometry(self) -> tuple[Any, ...]:
        t = self.tensor
        return (t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)

    def covers(self, other: _Use) -> bool:
        return (
            self.tensor.is_contiguous()
            and self.begin <= other.begin
            and other.end <= self.end
            and (other.begin - self.begin) % other.tensor.element_size() == 0
        )


class TensorTable:
    """A `TensorSink`: collects tensors while a tree is encoded; `entries` then lists what to write."""

    def __init__(self) -> None:
        self._uses: list[_Use] = []
        self._entries: list[Entry] = []
        self._keys: set[tuple[str, str]] = set()
        self._arrays: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._sharded: dict[Any, dict[str, Any]] = {}
        self.slices: list[Entry] = []
        """What this rank holds of sharded tensors."""
        self.sharded_tensors: dict[tuple[str, str], Slice] = {}
        """All sharded tensors, by file and key."""

    def add_tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        """A reference to `tensor`, completed by `entries`; one of the model has its own name in the model's file."""
        if path[:-1] == WEIGHTS and type(path[-1]) is str:
            return self._add(tensor, MODEL_FILE, path[-1], path)
        return self._add(tensor, TENSORS_FILE, self._free_key(TENSORS_FILE, _dotted(path)), path)

    def add_array(self, array: Any, path: Path) -> dict[str, Any]:
        """A reference to a NumPy array; the same object twice is stored once."""
        if array.dtype.hasobject or array.dtype.names is not None:
            hint = "it holds Python objects" if array.dtype.hasobject else "store its fields one by one"
            raise UnstorableStateError(format_path(path), "numpy.ndarray", hint)
        if id(array) not in self._arrays:
            self._arrays[id(array)] = (array, self._new_array(array, path))
        return dict(self._arrays[id(array)][1])

    def entries(self) -> list[Entry]:
        """All tensors to write, after completing every reference that was handed out."""
        by_storage: dict[tuple[Any, ...], list[_Use]] = defaultdict(list)
        for use in self._uses:
            if use.begin == use.end:
                self._store(use)
            else:
                by_storage[use.tensor.device, use.tensor.untyped_storage().data_ptr()].append(use)
        for uses in by_storage.values():
            if len(uses) == 1:  # As most are, and a save waits for this.
                self._store(uses[0])
                continue
            for overlapping in _overlapping(uses):
                self._store_together(overlapping)
        self._uses.clear()
        return self._entries

    def _add(self, tensor: torch.Tensor, file: str, key: str, path: Path) -> dict[str, Any]:
        if is_sharded(tensor):
            return self._add_sharded(tensor, file, key)
        tensor = unsharded(tensor)
        refuse_unknown(tensor, path)
        reference: dict[str, Any] = {}
        if tensor.requires_grad:
            reference["requires_grad"] = True
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
            reference["parameter"] = True
        values = tensor.detach().resolve_conj().resolve_neg()
        begin, end = _byte_range(values)
        self._keys.add((file, key))
        self._uses.append(_Use(values, reference, file, key, begin, end))
        return reference

    def _add_sharded(self, tensor: torch.Tensor, file: str, key: str) -> dict[str, Any]:
        sharded = cast("DTensor", tensor.detach())
        local, box, whole = sharded.to_local().resolve_conj().resolve_neg(), slice_of(sharded), tuple(sharded.shape)
        dtype = _name_of(local.dtype)
        memory = (local.device, local.data_ptr() or key, local.shape, local.stride(), dtype, box, whole)
        # The same slice of memory again, as the same weights in the trainer's own payload, is not stored twice.
        if memory not in self._sharded or file == MODEL_FILE:
            self._keys.add((file, key))
            part = Slice(box, whole, dtype)
            self.sharded_tensors[file, key] = part
            if is_saved_by_this_rank(sharded):
                stored, shape = stored_as(local)
                self.slices.append(Entry(file, key, stored, shape, local.nbytes, local, part))
            facts = {"file": file, "key": key, "sharded": {"dtype": dtype, "shape": list(whole)}}
            self._sharded.setdefault(memory, facts)
        reference = dict(self._sharded[memory])
        if tensor.requires_grad:
            reference |= {"requires_grad": True, "parameter": isinstance(tensor, torch.nn.Parameter)}
        return reference

    def _store_together(self, uses: list[_Use]) -> None:
        """Store tensors whose bytes overlap: one that covers the others, or the bytes of all of them."""
        if len({use.geometry for use in uses}) == 1:
            base = uses[0]
        else:
            base = next((use for use in uses if all(use.covers(other) for other in uses)), None) or self._union(uses)
        self._store(base)
        for use in uses:
            if use is base:
                continue
            if use.file == MODEL_FILE:
                self._store(use)
            self._refer(use, base)

    def _union(self, uses: list[_Use]) -> _Use:
        """All bytes that `uses` touch, for tensors that overlap without one of them holding the others."""
        # From a multiple of the largest element, so that each tensor starts at a multiple of its own.
        begin = min(use.begin for use in uses) // _LARGEST_ELEMENT * _LARGEST_ELEMENT
        end = max(use.end for use in uses)
        storage = uses[0].tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=uses[0].tensor.device).set_(
            storage, begin, (end - begin,), (1,)
        )
        key = self._free_key(TENSORS_FILE, f"{uses[0].key}#storage")
        self._keys.add((TENSORS_FILE, key))
        return _Use(flat, {}, TENSORS_FILE, key, begin, end)

    def _store(self, use: _Use) -> None:
        tensor = use.tensor
        name = _name_of(tensor.dtype)
        dtype, shape = stored_as(tensor)
        use.reference |= {"file": use.file, "key": use.key}
        if name not in TORCH_TYPES:
            use.reference |= {"dtype": name, "shape": list(tensor.shape)}
        if tensor.stride() != _row_major(tensor.shape) and _is_dense(tensor):
            use.reference["stride"] = list(tensor.stride())
        self._entries.append(Entry(use.file, use.key, dtype, shape, tensor.nbytes, tensor))

    @staticmethod
    def _refer(use: _Use, base: _Use) -> None:
        """Make `use` an alias, or a view, of the tensor that `base` stored."""
        own = {name: use.reference[name] for name in ("requires_grad", "parameter") if name in use.reference}
        use.reference.clear()
        stored = {name: item for name, item in base.reference.items() if name not in ("requires_grad", "parameter")}
        use.reference.update(stored | own)
        if use.geometry != base.geometry:
            use.reference["view"] = {
                "dtype": _name_of(use.tensor.dtype),
                "shape": list(use.tensor.shape),
                "stride": list(use.tensor.stride()),
                "offset": use.begin - base.begin,
                "span": use.end - use.begin,
            }

    def _new_array(self, array: Any, path: Path) -> dict[str, Any]:
        key = self._free_key(ARRAYS_FILE, _dotted(path))
        self._keys.add((ARRAYS_FILE, key))
        stored = np.ascontiguousarray(array).reshape(array.shape)
        self._entries.append(Entry(ARRAYS_FILE, key, RAW, (array.nbytes,), array.nbytes, stored))
        reference = {
            "file": ARRAYS_FILE,
            "key": key,
            "dtype": array.dtype.str,
            "shape": list(array.shape),
        }
        if array.flags.f_contiguous and not array.flags.c_contiguous:
            reference["order"] = "F"
        return reference

    def _free_key(self, file: str, key: str) -> str:
        candidate, number = key, 1
        while (file, candidate) in self._keys:
            number += 1
            candidate = f"{key}#{number}"
        return candidate


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def stored_as(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Element type and shape in the file; those that the format does not know are stored as bytes."""
    name = _name_of(tensor.dtype)
    return (TORCH_TYPES[name], tuple(tensor.shape)) if name in TORCH_TYPES else (RAW, (tensor.nbytes,))


def _dotted(path: Path) -> str:
    parts = path[1:] if path[0] == "checkpoint" else path
    return ".".join(part.name if isinstance(part, Attribute) else str(part) for part in parts)


def refuse_unknown(tensor: torch.Tensor, path: Path) -> None:
    """Refuse a tensor that is not dense, plain and with values.

    Raises:
        UnstorableStateError: Names its path, and what to do.
    """
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise _refusal(tensor, path, "only plain tensors and parameters can be stored; store what it is made of")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise _refusal(tensor, path, "convert it to a dense one", f" of layout {tensor.layout}")
    if tensor.is_meta:
        raise _refusal(tensor, path, "it is on the meta device and has no values")


def _refusal(tensor: torch.Tensor, path: Path, hint: str, more: str = "") -> UnstorableStateError:
    kind = type(tensor)
    return UnstorableStateError(format_path(path), f"{kind.__module__}.{kind.__qualname__}{more}", hint)


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor within its storage, and one past the last; equal for an empty one."""
    if tensor.numel() == 0:
        return 0, 0
    if tensor.is_contiguous():
        begin = int(tensor.storage_offset()) * tensor.element_size()
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (int(last) + 1) * tensor.element_size()


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their range without gaps or repetition, in whatever order of dimensions."""
    begin, end = _byte_range(tensor)
    return end - begin == tensor.numel() * tensor.element_size() and all(
        stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _overlapping(uses: list[_Use]) -> list[list[_Use]]:
    """Groups of tensors whose byte ranges touch the same bytes; parts of one storage that do not are independent."""
    groups: list[list[_Use]] = []
    end = -1
    for use in sorted(uses, key=lambda use: (use.begin, -use.end, use.file != MODEL_FILE)):
        if use.begin >= end:
            groups.append([])
        groups[-1].append(use)
        end = max(end, use.end)
    return groups
