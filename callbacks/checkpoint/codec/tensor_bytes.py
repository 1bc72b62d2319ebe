"""Raw bytes of tensors and arrays, without a copy where they lie in host memory in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["as_uint8", "bytes_of", "element_type", "empty_tensor"]


def bytes_of(source: Any) -> memoryview:
    """The values of a tensor or array, in row-major order, as bytes.

    A view of the source's own memory for a contiguous tensor of the host; a copy of this one tensor otherwise.
    """
    if isinstance(source, np.ndarray):
        flat = np.ascontiguousarray(source).reshape(-1)
        return flat.view(np.uint8).data if flat.size else memoryview(b"")
    if source.numel() == 0:
        return memoryview(b"")
    return _memory(as_uint8(source.cpu().contiguous()))


def as_uint8(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes."""
    # Not `reshape`: a single element is contiguous with any stride, and keeps it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def element_type(name: str) -> torch.dtype:
    """The torch type called `name`.

    Raises:
        ValueError: This torch has no such type.
    """
    dtype = vars(torch).get(name)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"torch {torch.__version__} has no element type {name!r}")


def empty_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, memoryview]:
    """A new tensor on the host, and its memory to be filled."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.numel() == 0:
        return tensor, memoryview(bytearray())
    return tensor, _memory(as_uint8(tensor))


def _memory(octets: torch.Tensor) -> memoryview:
    # Not `numpy()`, for ever after which the storage cannot be resized: observers of torch.ao resize their buffers.
    return np.from_dlpack(octets).data
