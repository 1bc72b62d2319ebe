"""Keeps the compiled code of one rank from the others.

torch's caches of compiled code on disk go by the whole shape of a sharded tensor. Where shards differ in size, a rank
would find and run the code of another one: an update that changes nothing, or that writes past the end of its shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.compiler.config
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["keep_compiled_code_apart"]


def keep_compiled_code_apart(tensors: Iterable[Tensor]) -> None:
    """From here on, compile for this rank alone if one of `tensors` has shards of different sizes."""
    if any(isinstance(tensor, DTensor) and _is_uneven(tensor) for tensor in tensors):
        own = f"rank {dist.get_rank()}"
        tag = torch.compiler.config.cache_key_tag
        if not tag.endswith(own):
            torch.compiler.config.cache_key_tag = f"{tag} {own}"


def _is_uneven(tensor: DTensor) -> bool:
    return any(
        tensor.shape[placement.dim] % tensor.device_mesh.size(dimension)  # type: ignore[attr-defined]
        for dimension, placement in enumerate(tensor.placements)
        if placement.is_shard()
    )
