"""The tensors of a state tree: what is written where, and which of them are the same memory.

A tensor that is met again, with the same memory, shape and strides, is stored once and is one tensor again after
loading. Other views of the same memory are stored with values of their own. A tensor of the model always has an entry
of its own, so that ``model.safetensors`` is complete for other tools.

A tensor that is sharded over the ranks has no entry, but a slice: the part of it that this rank holds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ....adapter.contract.exceptions import UnstorableStateError
from ..contents import RAW, TORCH_TYPES, Box, SlicedTensor
from ..format.record import MODEL_FILE, TENSORS_FILE
from ..sharded.slices import is_saved_by_this_rank, is_sharded, slice_of, unsharded
from .state_tree import Path, format_path

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["WEIGHTS", "Entry", "TensorTable", "entry_of", "is_plain", "stored_as"]

WEIGHTS = ("checkpoint", "state_dict")
"""Where a checkpoint has the model's tensors, by their names."""


@dataclass(eq=False)
class Entry:
    """One stored tensor; `source` still has its values, on whatever device."""

    file: str
    key: str
    dtype: str
    """The element type in the file."""
    shape: tuple[int, ...]
    nbytes: int
    source: torch.Tensor
    box: Box | None = None
    """Where it lies in a sharded tensor, of which it is only a part."""


class TensorTable:
    """A `TensorSink`: collects what to write while a tree is encoded."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.slices: list[Entry] = []
        """The slices of sharded tensors that this rank holds."""
        self.sharded_tensors: dict[tuple[str, str], SlicedTensor] = {}
        """All sharded tensors, by file and key, without their slices."""
        self._keys: set[tuple[str, str]] = set()
        self._known: dict[Any, dict[str, Any]] = {}
        """References by the memory that they are to."""

    def add_tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        """A reference to `tensor`; one of the model has its own name in the model's file."""
        file, key = TENSORS_FILE, ""
        if path[:-1] == WEIGHTS and type(path[-1]) is str:
            file, key = MODEL_FILE, path[-1]
        box = None
        if is_sharded(tensor):
            sharded = cast("DTensor", tensor.detach())
            values, box = sharded.to_local(), slice_of(sharded)
        else:
            values = unsharded(tensor)
            if not is_plain(values):
                kind = f"{type(values).__module__}.{type(values).__qualname__}"
                hint = "store a dense copy, or what it is made of; one on the meta device has no values"
                raise UnstorableStateError(format_path(path), kind, hint)
        values = values.detach().resolve_conj().resolve_neg()
        memory = (values.device, values.data_ptr() or path, values.shape, values.stride(), values.dtype, box)
        if memory not in self._known or file == MODEL_FILE:
            key = key or self._free_key(file, path)
            self._keys.add((file, key))
            if box is None:
                self.entries.append(entry_of(file, key, values))
                facts = _facts(values)
            else:
                name, shape = _name_of(values.dtype), tuple(sharded.shape)
                self.sharded_tensors[file, key] = SlicedTensor(file, key, name, shape, ())
                if is_saved_by_this_rank(sharded):
                    self.slices.append(entry_of(file, key, values, box))
                facts = {} if name in TORCH_TYPES else {"dtype": name, "shape": list(shape)}
            self._known.setdefault(memory, {"file": file, "key": key, **facts})
        reference = dict(self._known[memory])
        if tensor.requires_grad:
            reference["requires_grad"] = True
        if isinstance(tensor, torch.nn.Parameter):
            reference["parameter"] = True
        return reference

    def _free_key(self, file: str, path: Path) -> str:
        parts = path[1:] if path[0] == "checkpoint" else path
        key = candidate = ".".join(map(str, parts))
        number = 1
        while (file, candidate) in self._keys:
            number += 1
            candidate = f"{key}#{number}"
        return candidate


def entry_of(file: str, key: str, values: torch.Tensor, box: Box | None = None) -> Entry:
    """The entry of a plain tensor."""
    return Entry(file, key, *stored_as(values), values.nbytes, values, box)


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    """The part of a reference that a tensor's file cannot tell."""
    facts: dict[str, Any] = {}
    if (name := _name_of(tensor.dtype)) not in TORCH_TYPES:
        facts |= {"dtype": name, "shape": list(tensor.shape)}
    if not tensor.is_contiguous() and _is_dense(tensor):
        facts["stride"] = list(tensor.stride())
    return facts


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def stored_as(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Element type and shape in the file; those that the format does not know are stored as bytes."""
    name = _name_of(tensor.dtype)
    return (TORCH_TYPES[name], tuple(tensor.shape)) if name in TORCH_TYPES else (RAW, (tensor.nbytes,))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, of no class of its own, and has values."""
    is_dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_dense and not (tensor.is_quantized or tensor.is_meta)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their range without gaps or repetition, in whatever order of dimensions."""
    dimensions = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    extent = 1 + sum((size - 1) * step for size, step in dimensions)
    return extent == tensor.numel() and all(step > 0 for _, step in dimensions)
