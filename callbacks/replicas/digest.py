"""A number that differs where tensors differ: of all that a replica holds, or of one of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

__all__ = ["digest_of_all"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SMALL_BYTES = 64 * 1024
"""Tensors up to this size are copied together first: calls cost more than their bytes."""

_BLOCK = 251
"""Words that are summed before they are weighted: as many as make no difference to the time that a plain sum takes.

A prime, so that rows of a tensor that change places do not just change places with a block.
"""
_WEIGHTS = 8191


@torch.no_grad()
def digest_of_all(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A 64-bit number of the bits, shapes and order of `tensors`, on `device`; NaNs compare by their bits, too.

    Blocks of words are summed in one pass, and their sums then with an odd weight each. On a CPU a comparison takes
    little more than reading the tensors once does: some 30 GB a second.
    """
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    numbers: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() <= SMALL_BYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        else:
            numbers.setdefault(tensor.device, []).extend(_numbers(tensor))
    for (where, _), some in small.items():
        numbers.setdefault(where, []).extend(_numbers(_flattened(some)))
    # Of integers alone, which have the same hash in every process.
    shapes = hash(tuple((tensor.element_size(), *tensor.shape) for tensor in tensors))
    digests = [_on(device, _weighted(torch.cat(those))) for those in numbers.values()]
    return _weighted(torch.stack([torch.full((), shapes, dtype=torch.int64, device=device), *digests]))


def _on(device: torch.device, number: Tensor) -> Tensor:
    """`number` on `device`; one of the host is written by a kernel, since a copy would make the host wait."""
    if number.device.type != "cpu" or device.type == "cpu":
        return number.to(device)
    return torch.full((), int(number), dtype=torch.int64, device=device)


def _flattened(tensors: list[Tensor]) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def _numbers(tensor: Tensor) -> list[Tensor]:
    """The sums of blocks of a tensor's words, and the words behind the last block."""
    # Where hundreds of tensors are compared, each further call on one costs about as much as reading 20 KB of it.
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    count, size = flat.numel(), flat.element_size()
    tail = count % (8 // size)
    if flat.storage_offset() * size % 8:  # a view as words must begin at one
        flat = flat.clone()
    numbers = [flat[count - tail :].view(_BITS[size]).long()] if tail else []
    words = (flat[: count - tail] if tail else flat).view(torch.int64)
    count = count * size // 8
    if count <= _WEIGHTS:
        return [*numbers, words]
    blocks = count // _BLOCK
    numbers.append(words.as_strided((blocks, _BLOCK), (_BLOCK, 1)).sum(1))
    if count % _BLOCK:
        numbers.append(words[blocks * _BLOCK :])
    return numbers


def _weighted(words: Tensor) -> Tensor:
    weights = _weights(words.device)
    if len(words) > _WEIGHTS:
        weights = weights.repeat(-(-len(words) // _WEIGHTS))
    return (words * weights[: len(words)]).sum(dtype=torch.int64)


@functools.lru_cache
def _weights(device: torch.device) -> Tensor:
    """Odd, so that no difference is lost, and without a pattern."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**62), 2**62, (_WEIGHTS,), generator=generator, device="cpu") * 2 + 1).to(device)
