"""What else the ranks of a data-parallel run have alike: what they built, first weights, a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from .buckets import ON_THEIR_WAY_AT_MOST, grouped

__all__ = ["average_scalar", "broadcast_from_zero", "check_same", "check_same_on_all_ranks"]


@torch.no_grad()
def broadcast_from_zero(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` with those of the group's first rank; sharded tensors are left alone."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    on_their_way: deque[tuple[list[Tensor], Tensor, Any]] = deque()
    for bucket in grouped([t for t in tensors if not isinstance(t, DTensor)]):
        if len(on_their_way) == ON_THEIR_WAY_AT_MOST:
            _take(*on_their_way.popleft())
        flat = torch.cat([t.detach().reshape(-1) for t in bucket])
        on_their_way.append((bucket, flat, dist.broadcast(flat, src=source, group=group, async_op=True)))
    while on_their_way:
        _take(*on_their_way.popleft())


def _take(tensors: list[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    for tensor, view in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(view.view(tensor.shape))


def average_scalar(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """The mean of a loss over the ranks, of the type it came in; None and other things come back as they are."""
    if not isinstance(value, Tensor | float | int):
        return value
    mean = torch.as_tensor(value, dtype=torch.float64, device=device).detach().clone()
    dist.all_reduce(mean.div_(dist.get_world_size(group)), group=group)
    return mean.to(value.dtype) if isinstance(value, Tensor) else mean.item()


def check_same_on_all_ranks(
    discovered: Discovered, group: dist.ProcessGroup | None = None, rank_local: RankLocal = EVERYTHING_SHARED
) -> None:
    """Refuse ranks whose trainers built different things.

    Raises:
        ContractError: Names the first entry that differs and the two ranks.
    """
    check_same(_inventory(discovered, rank_local), group, _BUILT)


_BUILT = (
    "Ranks 0 and {rank} built different things: rank 0 has {here}, rank {rank} has {there}. `configure` must build the "
    "same modules and optimizers, in the same order, on every rank; what is meant to differ is named in the trainer's "
    "`rank_local`."
)


def check_same(mine: list[str], group: dist.ProcessGroup | None, text: str) -> None:
    """Refuse ranks whose lists differ.

    Args:
        mine: This rank's lines.
        group: Process group; None means all ranks.
        text: Of the error, with places for ``rank``, ``here`` and ``there``.

    Raises:
        ContractError: Two ranks differ.
    """
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            here, there = next(
                (a, b) for a, b in zip([*everyone[0], "nothing"], [*other, "nothing"], strict=False) if a != b
            )
            raise ContractError(text.format(rank=rank, here=here, there=there))


def _inventory(discovered: Discovered, rank_local: RankLocal) -> list[str]:
    tensors = rank_local.tensors(discovered)
    frozen = {id(p) for found in discovered.modules for p in found.value.parameters() if not p.requires_grad}
    lines = [f"{path} {tuple(t.shape)} {t.dtype}{' frozen' if id(t) in frozen else ''}" for path, t in tensors]
    for found in rank_local.shared(discovered):
        shapes = [[tuple(p.shape) for p in group["params"]] for group in found.value.param_groups]
        lines.append(f"{found.path} {type(found.value).__name__} over {shapes}")
    return lines
