"""Frozen weights: parameters that require no gradient and that no optimizer holds, as the start of training finds them.

They are written once. Each later checkpoint has a hard link to that file, so that its folder is whole by itself: it can
be removed, copied or moved without a look at the others. A file system without hard links gets them with every
checkpoint. With ``weights="trained"`` they are left out, as long as they are what the class builds: the record says
what their bytes were, and a resume takes them from the module, and from no other bytes than those.

At each save their bytes are compared with those of the start. Version counters would not do: those miss writes through
``tensor.data``, with which many a class moves its averaged copy of the weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from ...adapter.contract.exceptions import CheckpointError
from ..finite import are_finite
from .capture import Captured, FrozenFile
from .codec.digest import content_digests
from .codec.tensor_bytes import as_uint8, bytes_of
from .codec.tensor_table import stored_as
from .format.layout import FROZEN_FILE, MODEL_FILE
from .format.record import CheckpointRecord, LeftOut
from .format.safetensors_header import RAW
from .storage.commit import stage
from .storage.write_file import naming_the_checkpoint

__all__ = ["Frozen", "base_of", "described", "frozen_in", "left_out_tensors", "link", "require_base"]

log = logging.getLogger(__name__)

_LEAST_BYTES = 4096
"""Fewer bytes are written again: a file and a link take as much."""
_NAMED = 5


def frozen_in(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """By name, the parameters of `module` that require no gradient and that none of `optimizers` holds."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    parameters = module.named_parameters(remove_duplicate=False)
    found: dict[str, torch.Tensor] = {
        name: p for name, p in parameters if not p.requires_grad and id(p) not in held and _is_plain(p)
    }
    return found if sum(p.nbytes for p in found.values()) >= _LEAST_BYTES else {}


class Frozen:
    """The frozen weights of a training, from one checkpoint to the next.

    Args:
        tensors: What `frozen_in` found, at the start.
        base: Those that checkpoints leave out where they are as here; None writes them.
        earlier: The newest checkpoint of an earlier attempt, whose file may serve again.
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
        self._nonfinite = frozenset[str]()
        if not are_finite([tensor.detach() for tensor in tensors.values()]):
            self._nonfinite = frozenset(key for key, tensor in tensors.items() if not are_finite([tensor.detach()]))
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
            earlier=self._earlier,
            left_out=left_out,
            nonfinite=self._nonfinite & gone,
        )

    def learn(self, record: CheckpointRecord, captured: Captured) -> None:
        """Take note of the file of `record`, which is durable: the next checkpoint links it."""
        self._earlier = None
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
    """What a record says of tensors that it leaves out; nothing of those that this process does not hold whole."""
    return {
        key: LeftOut(key, *stored_as(tensor), xxhash.xxh3_128_hexdigest(bytes_of(tensor.detach())))
        for key, tensor in tensors.items()
        if _is_plain(tensor)
    }


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_dense and not (tensor.is_quantized or tensor.is_meta)


def left_out_tensors(record: CheckpointRecord, base: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """What `record` leaves out, copied from `base` and proven; as a file would hold it.

    Raises:
        CheckpointError: `base` lacks one, or has another; names it, with both digests, and the way out.
    """
    require_base(record, base)
    found = {}
    for left in record.left_out:
        tensor = (base or {}).get(left.key)
        if tensor is None:
            raise CheckpointError(_refusal(record, f"{left.key} is not among the tensors of the module"))
        if isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{record.name} leaves out {left.key}, which is sharded now: resume it without sharding, or save "
                "checkpoints with weights='all'"
            )
        dtype, shape = stored_as(tensor)
        if (dtype, shape) != (left.dtype, left.shape):
            was = f"{left.key} was {left.dtype} {list(left.shape)}, but the module has {dtype} {list(shape)}"
            raise CheckpointError(_refusal(record, was))
        host = tensor.detach().to("cpu", copy=True).contiguous()
        digest = xxhash.xxh3_128_hexdigest(bytes_of(host))
        if digest != left.xxh3_128:
            was = f"{left.key} had the digest {left.xxh3_128}, but in the module it has {digest}"
            raise CheckpointError(_refusal(record, was))
        found[left.key] = as_uint8(host) if dtype == RAW and host.dtype != torch.uint8 else host
    return found


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


def _refusal(record: CheckpointRecord, why: str) -> str:
    return (
        f"{record.name} goes with another base: {why}. It was saved with weights='trained' and leaves that out; build "
        "the module with the base that it was trained with, or begin a new run"
    )
