"""A number for everything that a replica holds, made of the digests that checkpoints have for their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..checkpoint.codec.tensors import content_digests, device_digest

__all__ = ["digest_of_all"]

SMALL_BYTES = 64 * 1024
"""Tensors up to this size are copied together first: calls cost more than their bytes."""


@torch.no_grad()
def digest_of_all(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A 64-bit number of the bits, types, shapes and order of `tensors`, on `device`, for which nothing waits.

    NaNs compare by their bits, too. Tensors of the host are hashed there, at about the speed at which memory is read.
    Those of a device stay there, and each of their words is mixed with its place.
    """
    pieces = _pieces(tensors)
    on_host = [piece for piece in pieces if piece.device.type == "cpu"]
    kinds = [(tensor.dtype, *tensor.shape) for tensor in tensors]
    text = xxhash.xxh3_64_intdigest(repr([kinds, *content_digests(on_host)]).encode()) - 2**63
    # By a kernel, since a copy from the host would make it wait.
    number = torch.full((1,), text, dtype=torch.int64, device=device)
    numbers = [device_digest(piece).to(device) for piece in pieces if piece.device.type != "cpu"]
    return device_digest(torch.cat([number, *numbers]))[0] if numbers else number[0]


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The large tensors, and the small ones of each device and type as one."""
    found: list[Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > SMALL_BYTES:
            found.append(tensor)
        else:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor.resolve_conj().resolve_neg())
    return found + [_flatten_dense_tensors(some) for some in small.values()]  # type: ignore[no-untyped-call]
