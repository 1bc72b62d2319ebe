"""Finds ranks that were lost, through the store of the process group.

The store works even after a rank is gone, unless the lost rank hosts it, and before the other ranks notice the loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..contract.exceptions import RankFailedError
from .torch_internals import default_store

ANSWERED_WITHIN_S = 2.0
"""Seconds that a running rank may take to notice a failure and to announce that it is alive."""


def explain_broken_broadcast(error: RuntimeError, step: int, group: dist.ProcessGroup | None) -> RankFailedError:
    """Return the error for buffers that did not arrive; waits some seconds for answers of the other ranks.

    Args:
        error: The error of the process group that ended the broadcast.
        step: The step at whose end the buffers were sent.
        group: The ranks; the first one sends its buffers to the others. None means all.
    """
    # Other ranks may have received their buffers; for them the connection breaks in the exchange of the next step.
    lost = find_lost(step + 1, group)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    return RankFailedError(
        f"the buffers that rank {source} sends at the end of step {step} did not arrive; {lost} ({error})"
    )


def find_lost(step: int, group: dist.ProcessGroup | None) -> str:
    """Return a description of the ranks of `group` that seem lost.

    Each rank whose exchange of `step` broke off calls this and announces itself. The others count as lost.
    """
    here, key = dist.get_rank(group), f"genlight/exchange that broke off in step {step}"
    if announce(f"{key}/{here}"):
        silent = find_silent(key, group)
    else:  # the rank that hosts the store is gone: under torchrun and Lightning that is the first one
        first, *others = _global_ranks(group)
        silent = others if here == 0 else [first]
    return describe_lost(silent, ANSWERED_WITHIN_S)


def describe_lost(lost: Sequence[int], seconds: float) -> str:
    """Return a description of `lost`, the ranks that did not answer within `seconds`; `lost` may be empty."""
    if not lost:
        return "all ranks still run, so the connection between them broke"
    names = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
    return f"{names} did not answer within {seconds:.0f} s: lost, or waiting for a lost rank"


def find_silent(key: str, group: dist.ProcessGroup | None) -> list[int]:
    """Return the global numbers of the other ranks of `group` that have not announced themselves under `key`."""
    here, deadline = dist.get_rank(group), time.monotonic() + ANSWERED_WITHIN_S
    ranks = enumerate(_global_ranks(group))
    return [number for rank, number in ranks if rank != here and not _answers(f"{key}/{rank}", deadline)]


def _global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    # Early releases of torch refuse None here.
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _answers(key: str, deadline: float) -> bool:
    try:
        default_store().wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
    except RuntimeError:
        return False
    return True


def announce(key: str) -> bool:
    """Announce in the store that this rank is alive; return False if the store is gone with the rank that hosts it."""
    try:
        default_store().set(key, "here")
    except RuntimeError:
        return False
    return True
