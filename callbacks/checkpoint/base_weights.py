"""Tensors that a checkpoint leaves out, because the run that resumes from it builds them again: the base of an adapter.

The record says of each what its bytes were. It is taken from the module that is about to be restored, and from no
other bytes than those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from ...adapter.contract.exceptions import CheckpointError
from .codec.tensor_bytes import as_uint8, bytes_of
from .codec.tensor_table import stored_as
from .format.record import CheckpointRecord, LeftOut
from .format.safetensors_header import RAW

__all__ = ["base_of", "describe", "is_describable", "left_out_tensors", "require_base"]

_NAMED = 5


def base_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name, the tensors of `module` from which a checkpoint may take what it leaves out."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


def describe(key: str, tensor: torch.Tensor) -> LeftOut:
    """What a record says of a tensor that it leaves out."""
    dtype, shape = stored_as(tensor)
    return LeftOut(key, dtype, shape, xxhash.xxh3_128_hexdigest(bytes_of(tensor.detach())))


def is_describable(tensor: torch.Tensor) -> bool:
    """Whether a checkpoint may leave out such a tensor: one of plain values that this process holds whole."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_plain and not (tensor.is_quantized or tensor.is_meta)


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
            told = f"{left.key} was {left.dtype} {list(left.shape)}, but the module has {dtype} {list(shape)}"
            raise CheckpointError(_refusal(record, told))
        host = tensor.detach().to("cpu", copy=True).contiguous()
        digest = xxhash.xxh3_128_hexdigest(bytes_of(host))
        if digest != left.xxh3_128:
            told = f"{left.key} had the digest {left.xxh3_128}, but in the module it has {digest}"
            raise CheckpointError(_refusal(record, told))
        found[left.key] = as_uint8(host) if dtype == RAW and host.dtype != torch.uint8 else host
    return found


def require_base(record: CheckpointRecord, base: Mapping[str, Any] | None) -> None:
    """Raise where `record` leaves tensors out and there is no `base` to take them from.

    Raises:
        CheckpointError: Says which, and what to do.
    """
    if record.left_out and base is None:
        raise CheckpointError(
            f"{record.name} leaves out {_named(record.left_out)}, which training did not change, because it was saved "
            "with weights='trained'. Resume it in a Trainer with the Checkpoint callback, whose module has them; else "
            "give them as `base`: load(path, base=module.state_dict()), or `genlight checkpoints export PATH --to FILE "
            "--base FILE.safetensors`"
        )


def _named(left: Sequence[LeftOut]) -> str:
    names = ", ".join(entry.key for entry in left[:_NAMED])
    return f"{len(left)} tensors ({names}{', …' if len(left) > _NAMED else ''})"


def _refusal(record: CheckpointRecord, told: str) -> str:
    return (
        f"{record.name} goes with another base: {told}. It was saved with weights='trained' and leaves that out; build "
        "the module with the base that it was trained with, or begin a new run"
    )
