"""One number for all tensors of a replica, from the digests that checkpoints use."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..checkpoint.codec.tensors import content_digests, device_digest

SMALL_BYTES = 64 * 1024
"""Tensors up to this size are concatenated first, because a call costs more than copying them."""


@torch.no_grad()
def digest_of_all(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a 64-bit digest of the bits, types, shapes and order of `tensors`, on `device`, without synchronizing.

    NaNs count by their bits. Tensors on the host are hashed there, at about memory speed. Tensors on a device stay
    there; each of their words is mixed with its place.
    """
    pieces = _pieces(tensors)
    on_host = [piece for piece in pieces if piece.device.type == "cpu"]
    kinds = [_kind(tensor.dtype, tensor.shape) for tensor in tensors]
    text = xxhash.xxh3_64_intdigest("".join([*kinds, *content_digests(on_host)]).encode()) - 2**63
    # `full` launches a kernel; a copy from the host would synchronize.
    number = torch.full((1,), text, dtype=torch.int64, device=device)
    numbers = [device_digest(piece).to(device) for piece in pieces if piece.device.type != "cpu"]
    return device_digest(torch.cat([number, *numbers]))[0] if numbers else number[0]


@functools.lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} {list(shape)} "


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the large tensors, and one concatenation of the small ones for each device and type."""
    large: list[Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > SMALL_BYTES:
            large.append(tensor)
        else:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    flat: list[Tensor] = [_flatten_dense_tensors(some) for some in small.values()]  # type: ignore[no-untyped-call]
    return large + [piece.resolve_conj().resolve_neg() for piece in flat]
