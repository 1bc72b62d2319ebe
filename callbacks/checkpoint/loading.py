"""Loading a checkpoint: every byte is proven before any of it is used.

A file is read once: its digest is taken from the very memory that becomes the tensors. Of tensors that were saved in
slices by several ranks, a rank of a sharded run reads no more than its own, block by block, each of which has a digest.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.safe_open import open_regular
from .capture import CONTRACT_KEY
from .codec.state_tree import decode
from .codec.tensor_bytes import as_uint8, element_type, empty_tensor
from .codec.tensor_table import stored_as
from .format.contents import parse_state_file
from .format.layout import ARRAYS_FILE, MODEL_FILE, STATE_FILE, TRAINER_FOLDER, record_path, tensor_file
from .format.record import CheckpointRecord, FileEntry
from .format.record_file import read_record
from .format.references import Stored, array_type, check_array, check_tensor
from .format.safetensors_header import HEADER_LIMIT, TORCH_TYPES, TypedShape, parse_header
from .format.shard_index import rank_of
from .format.verification import check_file, find_file, read_proven, verify_files
from .frozen import left_out_tensors, require_base
from .sharded.lazy_tensor import WholeTensor
from .sharded.read import Piece, pieces_of, stored_slices

__all__ = ["Base", "MapLocation", "load", "load_for_slices", "load_torch_file", "load_weights"]

MapLocation = Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None
"""As in ``torch.load``; None puts everything on the host."""

Base = Mapping[str, Any]
"""The model's tensors by name, of which those are taken that a checkpoint leaves out."""

_PIECE = 4 << 20

_TYPE_OF_FORMAT = {name: getattr(torch, torch_name) for torch_name, name in TORCH_TYPES.items()}


def load(path: str | os.PathLike[str], map_location: MapLocation = None, *, base: Base | None = None) -> dict[str, Any]:
    """The dictionary that was saved at `path`, with equal values of equal types.

    An older runtime's record gives ``{"genlight": {"state": …}, "global_step": step}``.

    Args:
        path: The checkpoint.
        map_location: Where tensors go; None means the host.
        base: The model's tensors, of which those are taken that the checkpoint leaves out.

    Raises:
        BrokenCheckpointError: Something differs from what was saved; nothing was loaded.
        CheckpointError: It holds a type that this process does not know, or leaves out what `base` does not have.
        FileNotFoundError: There is no such checkpoint.
    """
    return _load(_Source(read_record(record_path(path)), map_location, base=base))


def load_for_slices(path: str | os.PathLike[str], *, share: slice, base: Base | None = None) -> dict[str, Any]:
    """Like `load`, for a rank that needs its own slices of sharded tensors only: those are read when they are used.

    Args:
        path: The checkpoint.
        share: Which of the files with slices to prove now; every file has to be in the share of one rank, and nothing
            may be used before all ranks have proven theirs.
        base: As of `load`.

    Raises:
        BrokenCheckpointError: Something differs from what was saved.
        CheckpointError: It leaves out what `base` does not have.
        FileNotFoundError: There is no such checkpoint.
    """
    return _load(_Source(read_record(record_path(path)), None, share, base=base))


def load_torch_file(path: Path, map_location: MapLocation = None) -> dict[str, Any]:
    """What ``torch.save`` wrote to `path`, without a pickle that could run code."""
    location = "cpu" if map_location is None else map_location
    loaded: dict[str, Any] = torch.load(path, map_location=location, weights_only=True)
    return loaded


def load_weights(path: str | os.PathLike[str], *, base: Base | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors alone, proven; those that were sharded put together, those that are left out from `base`.

    Raises:
        BrokenCheckpointError: Something differs from what was saved.
        CheckpointError: It leaves out what `base` does not have.
    """
    record = read_record(record_path(path))
    left_out = left_out_tensors(record, base)
    weights = left_out
    for entry in record.files:
        if tensor_file(record.file_name(entry)) == MODEL_FILE:
            weights |= {key: tensor for key, (tensor, _) in _read_tensors(record, entry, as_arrays=False).items()}
    slices = [entry for entry in record.files if rank_of(record.file_name(entry)) is not None]
    verify_files(record, [entry for entry in slices if record.file_name(entry).endswith(MODEL_FILE)])
    for (file, key), pieces in pieces_of(record).items():
        if file == MODEL_FILE:
            first = pieces[0].entry
            weights[key] = stored_slices(record.name, pieces, first.whole, first.dtype).whole()
    return weights


def _load(source: _Source) -> dict[str, Any]:
    record = source.record
    if record.is_old:
        # What Lightning asks of any checkpoint; its weights, if it has some, are the trainer's affair.
        asked = {"pytorch-lightning_version": version("lightning"), "optimizer_states": [], "lr_schedulers": []}
        return {**asked, "epoch": 0, "global_step": record.step, CONTRACT_KEY: {"state": record.state}}
    content = source.read_all()
    try:
        checkpoint: dict[str, Any] = decode(content["checkpoint"], source)
        if record.state or CONTRACT_KEY in checkpoint:
            checkpoint.setdefault(CONTRACT_KEY, {})["state"] = decode(record.state, source)
        if "state_dict" in checkpoint:
            checkpoint["state_dict"] = _with_metadata(
                checkpoint["state_dict"], decode(content["weights_metadata"], source)
            )
    except (CheckpointError, OSError, MemoryError):  # of this machine: references were compared with the files
        raise
    except Exception as error:
        # The codecs call constructors, which raise what they like of values that a file has chosen.
        raise BrokenCheckpointError(record.name, f"its content is malformed: {error!r:.500}") from error
    return checkpoint


class _Source:
    """A `TensorSource` over the files of one checkpoint."""

    def __init__(
        self,
        record: CheckpointRecord,
        map_location: MapLocation,
        slices_to_prove: slice | None = None,
        *,
        base: Base | None = None,
    ) -> None:
        require_base(record, base)
        self.record, self._base_weights = record, base
        self._map_location = map_location
        self._slices_to_prove = slices_to_prove
        """None proves them all and reads them with the rest."""
        self._stored: dict[tuple[str, str], Any] = {}
        self._shapes: dict[tuple[str, str], Stored] = {}
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        self._given: dict[Any, Any] = {}

    def read_all(self) -> dict[str, Any]:
        """Read and prove all files, of those with slices the own share; returns the content of the state file."""
        record = self.record
        content: dict[str, Any] | None = None
        others, sliced = [], []
        for entry in record.files:
            name = record.file_name(entry)
            if name == STATE_FILE:
                content = parse_state_file(record, read_proven(record, entry))
            elif rank_of(name) is not None:
                sliced.append(entry)
            elif name.endswith(".safetensors") and not name.startswith(f"{TRAINER_FOLDER}/"):
                as_arrays = name == ARRAYS_FILE
                self._keep(tensor_file(name), _read_tensors(record, entry, as_arrays))
            else:
                others.append(entry)
        verify_files(record, others + sliced[self._slices_to_prove or slice(None)])
        for key, tensor in left_out_tensors(record, self._base_weights).items():
            facts = stored_as(tensor)
            self._keep(MODEL_FILE, {key: (tensor, TypedShape(*facts, 0, tensor.nbytes))})
        self._pieces = pieces_of(record)
        if content is None:
            raise BrokenCheckpointError(record.name, f"it has no {STATE_FILE}")
        return content

    def _keep(self, file: str, tensors: dict[str, tuple[Any, TypedShape]]) -> None:
        for key, (tensor, facts) in tensors.items():
            if (file, key) in self._stored:
                raise BrokenCheckpointError(self.record.name, f"it has {key!r} of {file} twice")
            self._stored[file, key] = tensor
            self._shapes[file, key] = Stored(facts.dtype, facts.shape, facts.end - facts.begin)

    def tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        """The tensor behind a reference; the same object for equal references."""
        identity = json.dumps(reference, sort_keys=True)
        if identity not in self._given:
            check_tensor(reference, self._shapes)  # before memory is taken for it
            self._given[identity] = self._make(reference)
        tensor: torch.Tensor = self._given[identity]
        return tensor

    def array(self, reference: dict[str, Any]) -> Any:
        """The array behind a reference; the same object for equal references."""
        identity = json.dumps(reference, sort_keys=True)
        if identity not in self._given:
            check_array(reference, self._shapes)
            stored = self._stored[reference["file"], reference["key"]]
            kind = array_type(reference["dtype"])
            array = (
                stored.view(kind).reshape(reference["shape"]) if kind.itemsize else np.zeros(reference["shape"], kind)
            )
            self._given[identity] = np.asfortranarray(array) if reference.get("order") == "F" else array
        return self._given[identity]

    def _make(self, reference: dict[str, Any]) -> torch.Tensor:
        if "sparse" in reference:
            indices, values, shape, is_coalesced = reference["sparse"]
            return torch.sparse_coo_tensor(
                self.tensor(indices), self.tensor(values), shape, is_coalesced=is_coalesced, check_invariants=True
            )
        tensor = self._put_together(reference) if "sharded" in reference else self._base(reference)
        if "view" in reference:
            tensor = _view(tensor, reference["view"])
        if isinstance(tensor, WholeTensor):
            return tensor
        if reference.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=reference.get("requires_grad", False))
        tensor = tensor.detach()
        return tensor.requires_grad_() if reference.get("requires_grad") else tensor

    def _put_together(self, reference: dict[str, Any]) -> torch.Tensor:
        """A tensor that was sharded: whole, or for the slices of a rank that reads its own."""
        facts, place = reference["sharded"], (reference["file"], reference["key"])
        slices = stored_slices(self.record.name, self._pieces.get(place, []), facts["shape"], facts["dtype"])
        if self._slices_to_prove is not None:
            return WholeTensor(slices)
        if ("", *place) not in self._given:
            whole = _located(slices.whole(), reference.get("device", "cpu"), self._map_location)
            self._given["", *place] = whole
        base: torch.Tensor = self._given["", *place]
        return base

    def _base(self, reference: dict[str, Any]) -> torch.Tensor:
        """The stored tensor behind a reference, with its own type and strides; one object for all that share it."""
        place = (reference["file"], reference["key"])
        if ("", *place) not in self._given:
            tensor = self._stored[place]
            if "dtype" in reference:
                tensor = tensor.view(element_type(reference["dtype"])).reshape(reference["shape"])
            if "stride" in reference:
                tensor = torch.empty_strided(tensor.shape, reference["stride"], dtype=tensor.dtype, device="cpu").copy_(
                    tensor
                )
            self._given["", *place] = _located(tensor, reference.get("device", "cpu"), self._map_location)
        base: torch.Tensor = self._given["", *place]
        return base


def _view(base: torch.Tensor, view: dict[str, Any]) -> torch.Tensor:
    part = as_uint8(base)[view["offset"] : view["offset"] + view["span"]]
    return part.view(element_type(view["dtype"])).as_strided(view["shape"], view["stride"])


def _located(tensor: torch.Tensor, saved_device: str, map_location: MapLocation) -> torch.Tensor:
    """`tensor` where `map_location` wants what was on `saved_device`."""
    if map_location is None:
        return tensor
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), saved_device)
        return tensor.to(saved_device if storage is None else storage.device)
    if isinstance(map_location, dict):
        return tensor.to(map_location.get(saved_device, saved_device))
    return tensor.to(map_location)


def _with_metadata(weights: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """Module versions beside the weights, where torch's ``load_state_dict`` looks for them."""
    ordered = OrderedDict(weights)
    if metadata is not None:
        ordered._metadata = metadata  # type: ignore[attr-defined]
    return ordered


def _read_tensors(record: CheckpointRecord, entry: FileEntry, as_arrays: bool) -> dict[str, tuple[Any, TypedShape]]:
    """Tensors (or arrays) of one file; none is handed out before the whole file is proven."""
    hasher = xxhash.xxh3_128()
    tensors: dict[str, tuple[Any, TypedShape]] = {}
    with os.fdopen(open_regular(find_file(record, entry)), "rb", buffering=0) as file:
        try:
            header_size = int.from_bytes(_take(file, memoryview(bytearray(8)), hasher), "little")
            if header_size > min(entry.size - 8, HEADER_LIMIT):
                raise ValueError("it has a header longer than the file, or than the format allows")
            header = bytes(_take(file, memoryview(bytearray(header_size)), hasher))
            for key, stored in parse_header(header, entry.size - 8 - header_size).items():
                tensor, memory = _allocate(stored, as_arrays)
                tensors[key] = (tensor, stored)
                _take(file, memory, hasher)
        except (ValueError, EOFError) as error:
            raise BrokenCheckpointError(record.name, f"{entry.path} is malformed: {error}") from error
        position = file.tell()
    check_file(record, entry, position, hasher.hexdigest())
    return tensors


def _take(file: Any, memory: memoryview, hasher: Any) -> memoryview:
    """Fill `memory` from `file`, in pieces that are hashed while they are in the cache."""
    for start in range(0, len(memory), _PIECE):
        piece = memory[start : start + _PIECE]
        filled = 0
        while filled < len(piece):
            count = file.readinto(piece[filled:])
            if not count:
                raise EOFError("it ends early")
            filled += count
        hasher.update(piece)
    return memory


def _allocate(stored: TypedShape, as_arrays: bool) -> tuple[Any, memoryview]:
    if as_arrays:
        array = np.empty(stored.end - stored.begin, np.uint8)
        return array, array.data
    return empty_tensor(_TYPE_OF_FORMAT[stored.dtype], stored.shape)
