"""One number for all tensors of a replica, from the digests that checkpoints use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..checkpoint.codec.tensors import content_digests, device_digest

SMALL_BYTES = 64 * 1024
"""Tensors up to this size are concatenated before they are hashed, because a call costs more than the copy."""


@torch.no_grad()
def digest_of_all(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a 64-bit digest of the bits, types and shapes of `tensors`, on `device`, without synchronizing.

    Tensors of the same type and shape are hashed together, in their order; in another order they have another digest.
    NaNs count by their bits. Tensors on the host are hashed there, at about memory speed, and tensors on a device on
    that device.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[Tensor]] = {}
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


def _pieces(alike: Iterable[list[Tensor]]) -> list[Tensor]:
    """Return the large tensors, and concatenations of the small ones.

    Args:
        alike: Lists of tensors of the same device, type and shape. One call copies all small ones of a list. If the
            result is still small, it is concatenated with others of the same device and type.
    """
    large: list[Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for some in alike:
        for piece in [torch.stack(some)] if len(some) > 1 and some[0].nbytes <= SMALL_BYTES else some:
            if piece.nbytes > SMALL_BYTES:
                large.append(piece)
            else:
                small.setdefault((piece.device, piece.dtype), []).append(piece)
    flat: list[Tensor] = [_flatten_dense_tensors(some) for some in small.values()]  # type: ignore[no-untyped-call]
    return large + [piece.resolve_conj().resolve_neg() for piece in flat]
