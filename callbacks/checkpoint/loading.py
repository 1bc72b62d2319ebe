"""The loading of a checkpoint.

A load proves every byte before any of it is used. A file is read once: its digest is computed from the same memory that
becomes the tensors. A start that chooses among checkpoints proves them in the same way, and keeps the tensors for the
load (`read_ahead`). If several ranks saved a tensor in slices, a rank of a sharded run uses only its own part, slice by
slice, from the memory in which the files were proven; each slice has a digest, too. If memory is short, these files are
proven first, and the slices are read again.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from ...adapter.cluster.job_context import this_rank
from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.safe_open import open_regular
from ...adapter.plumbing.text import list_first
from .capture import CONTRACT_KEY
from .codec.references import check_tensor
from .codec.state_tree import decode, dtype_of
from .codec.tensors import as_uint8, bytes_of, restore_flags
from .contents import read_contents, sliced_tensors
from .format.headers import RAW, TORCH_TYPES, TypedShape, header_from
from .format.record import (
    MODEL_FILE,
    STATE_FILE,
    CheckpointRecord,
    FileEntry,
    LeftOut,
    digest_of,
    read_record,
    record_path,
)
from .format.slice_index import Box, SlicedTensor, StoredSlice, is_of_tensors, part_folder, rank_of
from .frozen import describe_omitted
from .memory_tier import free_memory
from .sharded.slices import WholeTensor, view_of_part
from .storage import check_file, open_file_of, read_proven, verify_files

Base = Mapping[str, Any]
"""The model's tensors by name; the source of tensors that a checkpoint omits."""

_PIECE = 4 << 20
_MOST_AHEAD = 16
"""A checkpoint is read ahead only if free memory is this many times as large: all ranks read it and build models."""
_MOST_NAMES = 5

_TYPE_OF_FORMAT = {name: getattr(torch, torch_name) for torch_name, name in TORCH_TYPES.items()}


_ahead: dict[tuple[str, str], tuple[dict[str, torch.Tensor], dict[str, TypedShape]]] = {}
"""Proven tensors and headers by the digest of their record and their file, from `read_ahead` until the next load."""
_slices_ahead: dict[tuple[str, str], bytes] = {}
"""Proven contents of files with slices, by the same key and for the same time."""


def load(path: str | os.PathLike[str], *, base: Base | None = None) -> dict[str, Any]:
    """Return the dictionary saved at `path`, with equal values of equal types; its tensors are on the host.

    An older runtime's record gives ``{"genlight": {"state": …}, "global_step": step}``.

    Args:
        path: The checkpoint.
        base: The model's tensors; those that the checkpoint omits are taken from here.

    Raises:
        BrokenCheckpointError: A file differs from its record; nothing was loaded.
        CheckpointError: The checkpoint holds a type that this process does not know, or omits a tensor that `base`
            lacks.
        FileNotFoundError: There is no such checkpoint.
    """
    return load_record(read_record(record_path(path)), base=base)


def load_weights(path: str | os.PathLike[str], *, base: Base | None = None) -> dict[str, torch.Tensor]:
    """Return only the model's tensors, proven: sharded ones assembled, omitted ones taken from `base`.

    Raises:
        BrokenCheckpointError: A file differs from its record.
        CheckpointError: It omits a tensor that `base` lacks.
    """
    record = read_record(record_path(path))
    weights = omitted_tensors(record, base)
    for entry in record.files:
        if record.tensor_file(entry) == MODEL_FILE:
            weights |= read_tensors(record, entry)[0]
    proven = _prove_slices(record, [entry for entry in record.files if entry.path.endswith(MODEL_FILE)])
    sliced = [tensor for tensor in sliced_tensors(record) if tensor.file == MODEL_FILE]
    return weights | {tensor.key: StoredSlices(record, tensor, proven).whole() for tensor in sliced}


def load_torch_file(path: Path) -> dict[str, Any]:
    """Load a file that ``torch.save`` wrote, without a pickle that could run code.

    Raises:
        CheckpointError: It holds objects of classes that only such a pickle could make, or is not a file of torch.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"an object of {name[1]}" if name else "something"
        raise CheckpointError(
            f"{os.fspath(path)} holds {what} that torch reads only by running code of the file, which genlight never "
            "does. If you trust the file, write the part that you need to a new file of plain values: "
            "`torch.save({'state_dict': torch.load(FILE, weights_only=False)['state_dict']}, NEW_FILE)`"
        ) from error
    return loaded


def read_ahead(record: CheckpointRecord) -> None:
    """Prove all files of `record`, and keep its tensors for a load of it, so that their bytes are read once.

    Of the slices, only those are kept that a rank of the same number has saved. If memory is short, nothing is kept.

    Raises:
        BrokenCheckpointError: A file is missing or differs from what was saved.
    """
    _forget_ahead()
    names = {entry.path: record.file_name(entry) for entry in record.files}
    tensors = [entry for entry in record.files if is_of_tensors(names[entry.path])]
    sliced = [entry for entry in record.files if rank_of(names[entry.path]) == this_rank()]
    if not _fits([*tensors, *sliced]):
        tensors, sliced = [], []
    verify_files(record, [entry for entry in record.files if entry not in (*tensors, *sliced)])
    slices = {(record.digest, entry.path): read_proven(record, entry, bytes) for entry in sliced}
    _ahead.update({(record.digest, entry.path): read_tensors(record, entry) for entry in tensors})
    _slices_ahead.update(slices)


def _fits(entries: Iterable[FileEntry]) -> bool:
    return _MOST_AHEAD * sum(entry.size for entry in entries) <= free_memory()


def _forget_ahead() -> None:
    _ahead.clear()
    _slices_ahead.clear()


def _prove_slices(
    record: CheckpointRecord, entries: Sequence[FileEntry], share: tuple[int, int] = (0, 1)
) -> dict[str, bytes]:
    """Prove this rank's share of the files with slices among `entries`, and return their contents by path.

    Contents that `read_ahead` has kept are returned too. If memory is short, only these are returned.

    Args:
        record: The checkpoint's record.
        entries: Files of `record`.
        share: The same as in `load_record`.
    """
    rank, size = share
    by_rank = [(saved, entry) for entry in entries if (saved := rank_of(record.file_name(entry))) is not None]
    saved_by = 1 + max((saved for saved, _ in by_rank), default=0)
    proven = {each.path: _slices_ahead.pop((record.digest, each.path), None) for _, each in by_rank}
    left = [each for saved, each in by_rank if proven[each.path] is None and saved * size // saved_by == rank]
    if _fits(left):
        proven |= {entry.path: read_proven(record, entry, bytes) for entry in left}
    else:
        verify_files(record, left)
    return {path: content for path, content in proven.items() if content is not None}


def load_record(
    record: CheckpointRecord, *, base: Base | None = None, share: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Like `load`, for a record that was read already.

    Args:
        record: The checkpoint's record.
        base: The same as in `load`.
        share: This rank and the number of ranks. The ranks share the proof of the files with slices: each rank proves
            the files that it probably uses. Slices are then read only when they are used. No rank may use a tensor
            before all ranks have proven their shares. None proves and reads all files.
    """
    if record.is_old:
        # Lightning requires these of any checkpoint. The trainer class restores its weights from ``state``.
        required = {"pytorch-lightning_version": version("lightning"), "optimizer_states": [], "lr_schedulers": []}
        return {**required, "epoch": 0, "global_step": record.step, CONTRACT_KEY: {"state": record.state}}
    source = _Source(record, base, share)
    try:
        checkpoint: dict[str, Any] = decode(source.content["checkpoint"], source.tensor)
        if record.state or CONTRACT_KEY in checkpoint:
            checkpoint.setdefault(CONTRACT_KEY, {})["state"] = decode(record.state, source.tensor)
        if "state_dict" in checkpoint:
            weights = checkpoint["state_dict"] = OrderedDict(checkpoint["state_dict"])
            if (metadata := decode(source.content["weights_metadata"], source.tensor)) is not None:
                # Versions of modules, in the attribute that torch reads.
                weights._metadata = metadata  # type: ignore[attr-defined]
    except (CheckpointError, OSError, MemoryError):  # not faults of the content
        raise
    except Exception as error:
        # The codecs call constructors, and those may raise anything for values from a file.
        raise BrokenCheckpointError(record.name, f"its content is malformed: {error!r:.500}") from error
    return checkpoint


class _Source:
    """The tensors in the files of one checkpoint."""

    def __init__(self, record: CheckpointRecord, base: Base | None, share: tuple[int, int] | None) -> None:
        """Read and prove all files; of the files with slices, only this rank's `share`, if it is not None."""
        self._is_lazy = share is not None
        self._stored = {(MODEL_FILE, key): tensor for key, tensor in omitted_tensors(record, base).items()}
        self._made: dict[Any, torch.Tensor] = {}
        self.content, self._facts, in_slices = read_contents(record, self._read_file)
        """`content` is the content of the state file."""
        others, sliced = [], []
        for entry in record.files:
            name = record.file_name(entry)
            if rank_of(name) is not None:
                sliced.append(entry)
            elif name != STATE_FILE and not is_of_tensors(name):
                others.append(entry)
        verify_files(record, others)
        proven = _prove_slices(record, sliced, share or (0, 1))
        _forget_ahead()
        self._sliced = {(each.file, each.key): StoredSlices(record, each, proven) for each in in_slices}

    def _read_file(self, record: CheckpointRecord, entry: FileEntry) -> dict[str, TypedShape]:
        place = record.digest, entry.path
        tensors, header = _ahead.pop(place) if place in _ahead else read_tensors(record, entry)
        file = record.tensor_file(entry)
        self._stored |= {(file, key): tensor for key, tensor in tensors.items()}
        return header

    def tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        """Return the tensor for a reference; the same object for equal references."""
        identity = json.dumps(reference, sort_keys=True)
        if identity not in self._made:
            check_tensor(reference, self._facts)  # before memory is allocated for it
            self._made[identity] = self._make(reference)
        return self._made[identity]

    def _make(self, reference: dict[str, Any]) -> torch.Tensor:
        place = (reference["file"], reference["key"])
        if place in self._sliced and self._is_lazy:
            return WholeTensor(self._sliced[place])
        if place not in self._made:
            self._made[place] = self._read(reference)
        return restore_flags(self._made[place], reference)

    def _read(self, reference: dict[str, Any]) -> torch.Tensor:
        """Return the stored tensor for a reference, with its own type and strides; shared by all references to it."""
        place = (reference["file"], reference["key"])
        if place in self._sliced:
            return self._sliced[place].whole()
        tensor = self._stored[place]
        if "dtype" in reference:
            tensor = tensor.view(dtype_of(reference["dtype"])).reshape(reference["shape"])
        if "stride" in reference:
            strided = torch.empty_strided(tensor.shape, reference["stride"], dtype=tensor.dtype, device="cpu")
            tensor = strided.copy_(tensor)
        return tensor


@dataclass(frozen=True)
class StoredSlices:
    """A sharded tensor of a checkpoint; its values are read on demand."""

    record: CheckpointRecord
    tensor: SlicedTensor
    proven: Mapping[str, bytes]
    """Contents of files by path. A slice of any other file is read from the disk."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return dtype_of(self.tensor.dtype)

    def whole(self) -> torch.Tensor:
        """Return the complete tensor, assembled from all slices."""
        return self.read(Box((0,) * len(self.tensor.shape), self.tensor.shape))

    def read(self, part: Box) -> torch.Tensor:
        """Return the saved values of one part, from the slices that overlap it.

        Raises:
            BrokenCheckpointError: The values in a file differ from the saved ones.
        """
        result = torch.empty(part.shape, dtype=self.dtype, device="cpu")
        for stored in self.tensor.slices:
            common = stored.box.overlap(part)
            if common is not None:
                view_of_part(common, result, of=part).copy_(view_of_part(common, self._slice(stored), of=stored.box))
        return result

    def _slice(self, stored: StoredSlice) -> torch.Tensor:
        """Return the proven values of one slice."""
        values = torch.empty(stored.box.shape, dtype=self.dtype, device="cpu")
        data, name = bytes_of(values), f"{part_folder(stored.rank)}/{self.tensor.file}"
        path = f"{self.record.folder}/{name}"
        if path in self.proven:
            content = memoryview(self.proven[path])[stored.begin : stored.begin + len(data)]
            data[: len(content)] = content  # if it is short, the digest differs
        else:
            with os.fdopen(open_regular(self.record.path.parent / path), "rb") as file:
                file.seek(stored.begin)
                file.readinto(data)
        if digest_of(data) != stored.xxh3_128:
            raise BrokenCheckpointError(self.record.name, f"{name} does not hold the saved values of {self.tensor.key}")
        return values


def read_tensors(record: CheckpointRecord, entry: FileEntry) -> tuple[dict[str, torch.Tensor], dict[str, TypedShape]]:
    """Return the tensors of one file, and its header, after the complete file is proven."""
    hasher = xxhash.xxh3_128()
    tensors: dict[str, torch.Tensor] = {}
    with open_file_of(record, entry) as file:
        header = header_from(lambda size: bytes(_take(file, memoryview(bytearray(size)), hasher)), entry.size)
        for key, stored in header.items():
            tensors[key] = torch.empty(stored.shape, dtype=_TYPE_OF_FORMAT[stored.dtype], device="cpu")
            _take(file, bytes_of(tensors[key]), hasher)
        position = file.tell()
    check_file(record, entry, position, hasher.hexdigest())
    return tensors, header


def _take(file: BinaryIO, memory: memoryview, hasher: Any) -> memoryview:
    """Fill `memory` from `file`, in pieces that are hashed while they are in the CPU cache."""
    for start in range(0, len(memory), _PIECE):
        piece = memory[start : start + _PIECE]
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]
            raise EOFError("it ends early")
        hasher.update(piece)
    return memory


def omitted_tensors(record: CheckpointRecord, base: Base | None) -> dict[str, torch.Tensor]:
    """Return the tensors that `record` omits, copied from `base` and proven, in the form that a file would have.

    A tensor that `base` does not have by name is found by its content, whatever its name.

    Raises:
        CheckpointError: There is no `base`, or a tensor in it is missing or differs; names the tensor and the way out.
    """
    if record.left_out and base is None:
        names = list_first([entry.key for entry in record.left_out], _MOST_NAMES)
        raise CheckpointError(
            f"{record.name} omits {len(record.left_out)} tensors ({names}), which training did not change, "
            "because it was saved with weights='trained'. Resume it in a Trainer with the Checkpoint callback, whose "
            "module has them; or pass them as `base`: load(path, base=module.state_dict()), or `genlight checkpoints "
            "export PATH --to FILE --base FILE.safetensors`"
        )
    base = base or {}
    by_content: dict[LeftOut, Any] = {}
    if any(left.key not in base for left in record.left_out):
        # Names differ if the module holds its base within others: PEFT renames the weights of a model.
        plain = {key: each for key, each in base.items() if isinstance(each, torch.Tensor)}
        by_content = {replace(left, key=""): plain[left.key] for left in describe_omitted(plain).values()}
    tensors = {}
    for left in record.left_out:
        built = base[left.key] if left.key in base else by_content.get(replace(left, key=""))
        host = None if built is None else built.detach().to("cpu", copy=True).contiguous()
        now = None if host is None else describe_omitted({left.key: host}).get(left.key)
        if host is None or now != left:
            has = "does not have it" if host is None else "has a part of it" if now is None else f"has {_text_of(now)}"
            raise CheckpointError(
                f"{record.name} belongs to another base: {left.key} was {_text_of(left)}, and the module {has}. It was "
                "saved with weights='trained' and omits that tensor; build the module, unsharded, with the base that "
                "it was trained with, or begin a new run"
            )
        tensors[left.key] = as_uint8(host) if left.dtype == RAW and host.dtype != torch.uint8 else host
    return tensors


def _text_of(left: LeftOut) -> str:
    return f"{left.dtype} {list(left.shape)} with the digest {left.xxh3_128}"
