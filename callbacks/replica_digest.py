"""Numbers that differ where tensors differ: of one tensor, and of all that a replica holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

__all__ = ["digest", "digest_of_all"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SMALL_BYTES = 64 * 1024
"""Tensors up to this size are copied together first: calls cost more than their bytes."""

_BLOCK = 251
"""Words that are summed before they are weighted: as many as make no difference to the time that a plain sum takes.

A prime, so that rows of a tensor that change places do not just change places with a block.
"""
_WEIGHTS = 8191


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A 64-bit number of a tensor's bits and their places, on its device; NaNs compare by their bits, too.

    Blocks of words are summed in one pass, and their sums then with an odd weight each.
    """
    words = _words(tensor)
    if len(words) <= _WEIGHTS:
        return _weighted(words)
    whole = len(words) // _BLOCK * _BLOCK
    blocks = words[:whole].view(-1, _BLOCK).sum(1, dtype=torch.int64)
    return _weighted(torch.cat([words[whole:].long(), blocks]))


@torch.no_grad()
def digest_of_all(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A 64-bit number of the bits, shapes and order of `tensors`, on `device`."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    digests = []
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        else:
            digests.append(digest(tensor))
    digests += [digest(_flattened(small)) for small in kinds.values()]
    # Of integers alone, which have the same hash in every process.
    shapes = hash(tuple((tensor.element_size(), *tensor.shape) for tensor in tensors))
    numbers = [torch.tensor(shapes, device=device), *(number.to(device) for number in digests)]
    return _weighted(torch.stack(numbers))


def _flattened(tensors: list[Tensor]) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0:
        # Whole words need no conversion, which is most of the cost; a view of them must begin at one.
        flat = flat if flat.storage_offset() * size % 8 == 0 else flat.clone()
        return flat.view(torch.int64)
    return flat.view(_BITS[size])


def _weighted(words: Tensor) -> Tensor:
    weights = _weights(words.device)
    if len(words) > _WEIGHTS:
        weights = weights.repeat(-(-len(words) // _WEIGHTS))
    return (words * weights[: len(words)]).sum(dtype=torch.int64)


@functools.lru_cache
def _weights(device: torch.device) -> Tensor:
    """Odd, so that no difference is lost, and without a pattern."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**62), 2**62, (_WEIGHTS,), generator=generator) * 2 + 1).to(device)
