"""Checks that all ranks built the same objects in ``configure``."""

from __future__ import annotations

import torch.distributed as dist

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from ..discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..plumbing.devices import gather_objects


def check_same_on_all_ranks(
    discovered: Discovered, group: dist.ProcessGroup | None = None, rank_local: RankLocal = EVERYTHING_SHARED
) -> None:
    """Refuse ranks whose trainers built different things.

    Raises:
        ContractError: Names the first entry that differs and the two ranks.
    """
    everyone: list[list[str]] = gather_objects(_inventory(discovered, rank_local), group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            here, there = next(
                (a, b) for a, b in zip([*everyone[0], "nothing"], [*other, "nothing"], strict=False) if a != b
            )
            raise ContractError(
                f"Ranks 0 and {rank} built different things: rank 0 has {here}, rank {rank} has {there}. `configure` "
                "must build the same modules and optimizers, in the same order, on every rank; name objects that are "
                "meant to differ in the trainer's `rank_local`."
            )


def _inventory(discovered: Discovered, rank_local: RankLocal) -> list[str]:
    tensors = rank_local.tensors(discovered)
    frozen = {id(p) for found in discovered.modules for p in found.value.parameters() if not p.requires_grad}
    lines = [f"{path} {tuple(t.shape)} {t.dtype}{' frozen' if id(t) in frozen else ''}" for path, t in tensors]
    for found in rank_local.shared(discovered):
        shapes = [[tuple(p.shape) for p in group["params"]] for group in found.value.param_groups]
        lines.append(f"{found.path} {type(found.value).__name__} over {shapes}")
    return lines
