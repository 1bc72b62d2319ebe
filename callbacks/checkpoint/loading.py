"""Loading a checkpoint: every byte is proven before any of it is used.

A file is read once: its digest is taken from the very memory that becomes the tensors. Of tensors that were saved in
slices by several ranks, a rank of a sharded run reads no more than its own, block by block, each of which has a digest.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.safe_open import open_regular
from .capture import CONTRACT_KEY, described
from .codec.state_tree import decode
from .codec.tensor_bytes import as_uint8, bytes_of, element_type
from .contents import (
    RAW,
    TORCH_TYPES,
    TypedShape,
    check_tensor,
    header_from,
    is_of_tensors,
    rank_of,
    read_contents,
    sliced_tensors,
)
from .format.record import (
    MODEL_FILE,
    STATE_FILE,
    CheckpointRecord,
    FileEntry,
    LeftOut,
    read_record,
    record_path,
    tensor_file,
)
from .sharded.slices import StoredSlices, WholeTensor
from .storage import check_file, find_file, verify_files

__all__ = ["Base", "load", "load_record", "load_torch_file", "load_weights"]

Base = Mapping[str, Any]
"""The model's tensors by name, of which those are taken that a checkpoint leaves out."""

_PIECE = 4 << 20
_NAMED = 5

_TYPE_OF_FORMAT = {name: getattr(torch, torch_name) for torch_name, name in TORCH_TYPES.items()}


def load(path: str | os.PathLike[str], *, base: Base | None = None) -> dict[str, Any]:
    """The dictionary that was saved at `path`, with equal values of equal types; its tensors are on the host.

    An older runtime's record gives ``{"genlight": {"state": …}, "global_step": step}``.

    Args:
        path: The checkpoint.
        base: The model's tensors, of which those are taken that the checkpoint leaves out.

    Raises:
        BrokenCheckpointError: Something differs from what was saved; nothing was loaded.
        CheckpointError: It holds a type that this process does not know, or leaves out what `base` does not have.
        FileNotFoundError: There is no such checkpoint.
    """
    return load_record(read_record(record_path(path)), base=base)


def load_torch_file(path: Path) -> dict[str, Any]:
    """Load a file that ``torch.save`` wrote, without a pickle that could run code.

    Raises:
        CheckpointError: It holds objects of classes that only such a pickle could make, or is no file of torch.
    """
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"an object of {name[1]}" if name else "something"
        raise CheckpointError(
            f"{os.fspath(path)} holds {what} that torch reads only by running code of the file, which genlight never "
            "does. If you trust the file, keep what you need of it in one of plain values: `torch.save({'state_dict': "
            "torch.load(FILE, weights_only=False)['state_dict']}, NEW_FILE)`"
        ) from error
    return loaded


def load_weights(path: str | os.PathLike[str], *, base: Base | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors alone, proven; those that were sharded put together, those that are left out from `base`.

    Raises:
        BrokenCheckpointError: Something differs from what was saved.
        CheckpointError: It leaves out what `base` does not have.
    """
    record = read_record(record_path(path))
    weights = left_out_tensors(record, base)
    for entry in record.files:
        if tensor_file(record.file_name(entry)) == MODEL_FILE:
            weights |= _read_tensors(record, entry)[0]
    slices = [entry for entry in record.files if rank_of(record.file_name(entry)) is not None]
    verify_files(record, [entry for entry in slices if record.file_name(entry).endswith(MODEL_FILE)])
    sliced = [tensor for tensor in sliced_tensors(record) if tensor.file == MODEL_FILE]
    return weights | {tensor.key: StoredSlices(record, tensor).whole() for tensor in sliced}


def load_record(
    record: CheckpointRecord,
    *,
    base: Base | None = None,
    share: slice | None = None,
) -> dict[str, Any]:
    """As `load`, where the record was read already.

    Args:
        record: That of the checkpoint.
        base: As of `load`.
        share: For a rank that needs its own slices of sharded tensors only: those are read when they are used. It says
            which of the files with slices to prove now; every file has to be in the share of one rank, and nothing
            may be used before all ranks have proven theirs.
    """
    if record.is_old:
        # What Lightning asks of any checkpoint; its weights, if it has some, are the trainer's affair.
        asked = {"pytorch-lightning_version": version("lightning"), "optimizer_states": [], "lr_schedulers": []}
        return {**asked, "epoch": 0, "global_step": record.step, CONTRACT_KEY: {"state": record.state}}
    source = _Source(record, base, share)
    try:
        checkpoint: dict[str, Any] = decode(source.content["checkpoint"], source)
        if record.state or CONTRACT_KEY in checkpoint:
            checkpoint.setdefault(CONTRACT_KEY, {})["state"] = decode(record.state, source)
        if "state_dict" in checkpoint:
            weights = checkpoint["state_dict"] = OrderedDict(checkpoint["state_dict"])
            if (metadata := decode(source.content["weights_metadata"], source)) is not None:
                # Versions of modules, where torch looks for them.
                weights._metadata = metadata  # type: ignore[attr-defined]
    except (CheckpointError, OSError, MemoryError):  # of this machine: references were compared with the files
        raise
    except Exception as error:
        # The codecs call constructors, which raise what they like of values that a file has chosen.
        raise BrokenCheckpointError(record.name, f"its content is malformed: {error!r:.500}") from error
    return checkpoint


class _Source:
    """A `TensorSource` over the files of one checkpoint."""

    def __init__(self, record: CheckpointRecord, base: Base | None, share: slice | None) -> None:
        """Read and prove all files, of those with slices the own share."""
        self._is_lazy = share is not None
        self._stored = {(MODEL_FILE, key): tensor for key, tensor in left_out_tensors(record, base).items()}
        self._given: dict[Any, torch.Tensor] = {}
        self.content, self._facts, in_slices = read_contents(record, self._read_file)
        """`content` is that of the state file."""
        others, sliced = [], []
        for entry in record.files:
            name = record.file_name(entry)
            if rank_of(name) is not None:
                sliced.append(entry)
            elif name != STATE_FILE and not is_of_tensors(name):
                others.append(entry)
        verify_files(record, others + sliced[share or slice(None)])
        self._sliced = {(each.file, each.key): StoredSlices(record, each) for each in in_slices}

    def _read_file(self, record: CheckpointRecord, entry: FileEntry) -> dict[str, TypedShape]:
        tensors, header = _read_tensors(record, entry)
        file = tensor_file(record.file_name(entry))
        self._stored |= {(file, key): tensor for key, tensor in tensors.items()}
        return header

    def tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        """The tensor behind a reference; the same object for equal references."""
        identity = json.dumps(reference, sort_keys=True)
        if identity not in self._given:
            check_tensor(reference, self._facts)  # before memory is taken for it
            self._given[identity] = self._make(reference)
        return self._given[identity]

    def _make(self, reference: dict[str, Any]) -> torch.Tensor:
        place = (reference["file"], reference["key"])
        if place in self._sliced and self._is_lazy:
            return WholeTensor(self._sliced[place])
        if place not in self._given:
            self._given[place] = self._read(reference)
        tensor = self._given[place]
        if reference.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=reference.get("requires_grad", False))
        tensor = tensor.detach()
        return tensor.requires_grad_() if reference.get("requires_grad") else tensor

    def _read(self, reference: dict[str, Any]) -> torch.Tensor:
        """The stored tensor behind a reference, with its own type and strides; for all references to it."""
        place = (reference["file"], reference["key"])
        if place in self._sliced:
            return self._sliced[place].whole()
        tensor = self._stored[place]
        if "dtype" in reference:
            tensor = tensor.view(element_type(reference["dtype"])).reshape(reference["shape"])
        if "stride" in reference:
            strided = torch.empty_strided(tensor.shape, reference["stride"], dtype=tensor.dtype, device="cpu")
            tensor = strided.copy_(tensor)
        return tensor


def _read_tensors(record: CheckpointRecord, entry: FileEntry) -> tuple[dict[str, torch.Tensor], dict[str, TypedShape]]:
    """Tensors of one file, and its header; none is handed out before the whole file is proven."""
    hasher = xxhash.xxh3_128()
    tensors: dict[str, torch.Tensor] = {}
    with os.fdopen(open_regular(find_file(record, entry)), "rb") as file:
        try:
            found = header_from(lambda size: bytes(_take(file, memoryview(bytearray(size)), hasher)), entry.size)
            for key, stored in found.items():
                tensors[key] = torch.empty(stored.shape, dtype=_TYPE_OF_FORMAT[stored.dtype], device="cpu")
                _take(file, bytes_of(tensors[key]), hasher)
        except (ValueError, EOFError) as error:
            raise BrokenCheckpointError(record.name, f"{entry.path} is malformed: {error}") from error
        position = file.tell()
    check_file(record, entry, position, hasher.hexdigest())
    return tensors, found


def _take(file: BinaryIO, memory: memoryview, hasher: Any) -> memoryview:
    """Fill `memory` from `file`, in pieces that are hashed while they are in the cache."""
    for start in range(0, len(memory), _PIECE):
        piece = memory[start : start + _PIECE]
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]
            raise EOFError("it ends early")
        hasher.update(piece)
    return memory


def left_out_tensors(record: CheckpointRecord, base: Base | None) -> dict[str, torch.Tensor]:
    """The tensors that `record` leaves out, copied from `base` and proven; as a file would hold them.

    Raises:
        CheckpointError: There is no `base`, or it lacks one, or has another; names it, and the way out.
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
