"""Check all tensors for nan and infinity at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

_NORMED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
_WIDENED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
"""Types for which torch cannot compute a norm; they are converted to float32 first."""


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element of `tensors` is finite; waits for each device once.

    Sparse tensors and types without infinities count as finite.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.numel() and local.layout == torch.strided and local.dtype in _NORMED | _WIDENED:
            groups[local.device, local.dtype].append(local)
    verdicts: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for (device, dtype), group in groups.items():
        verdicts[device].append(torch.isfinite(_magnitudes(group, dtype)).all())
    return all(bool(torch.stack(on_device).all()) for on_device in verdicts.values())


def _magnitudes(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return each tensor's largest magnitude, or its minimum and maximum; nan if an element is nan.

    It does not use the 2-norm, whose sum of squares could overflow.
    """
    if dtype in _WIDENED:
        return torch.stack([tensor.float().abs().max() for tensor in tensors])
    if tensors[0].is_cpu and not dtype.is_complex:  # on the CPU a norm takes five times as long
        return torch.stack([bound for tensor in tensors for bound in torch.aminmax(tensor)])
    return torch.stack(list(torch._foreach_norm(tensors, float("inf"))))
