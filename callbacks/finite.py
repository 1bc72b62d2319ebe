"""Whether tensors hold a nan or an infinity, in one look at all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

__all__ = ["are_finite"]


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element of `tensors` is finite; waits for each device once."""
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and (local.is_floating_point() or local.is_complex()):
            by_device[local.device].append(local.detach())
    return all(bool(torch.isfinite(_largest(group)).all()) for group in by_device.values())


def _largest(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, nan where it holds one; a sum of squares could overflow."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    norms = [norm.float() for group in by_dtype.values() for norm in torch._foreach_norm(group, float("inf"))]
    return torch.stack(norms)
