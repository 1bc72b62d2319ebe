"""Names the rank that was lost when an exchange of gradients, or of buffers, breaks off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..contract.exceptions import RankFailedError
from .rank_points import Point
from .torch_internals import default_store

__all__ = ["about_broken_exchange", "about_missing_buffers"]

ANSWERED_WITHIN_S = 2.0
"""How long a rank that still runs may take to notice the same and say so."""


def about_broken_exchange(
    error: RuntimeError, at: Point, what: str, group: dist.ProcessGroup | None
) -> RankFailedError:
    """The error of an exchange that `error` ended; waits some seconds for the other ranks, which see it break, too.

    Args:
        error: What the process group raised.
        at: Where this rank is.
        what: Path of the first parameter of the bucket that was on its way.
        group: Of the ranks that exchange gradients; None means all.
    """
    here, lost = dist.get_rank(), _who_is_lost(at.step, group)
    return RankFailedError(
        f"the exchange of gradients broke off in step {at.step}, where rank {here} {at}, at the bucket of {what}; "
        f"{lost} ({error})"
    )


def about_missing_buffers(
    error: RuntimeError, step: int, source: int, group: dist.ProcessGroup | None
) -> RankFailedError:
    """The error of a rank that gets no buffers, because of `error`; waits some seconds for the other ranks.

    Args:
        error: What the process group raised.
        step: At whose end they were sent.
        source: The rank that sends them.
        group: Of the ranks that get them; None means all.
    """
    # Other ranks may have them, and see the connection break in the exchange of the next step.
    lost = _who_is_lost(step + 1, group)
    return RankFailedError(
        f"the buffers that rank {source} sends at the end of step {step} did not arrive; {lost} ({error})"
    )


def _who_is_lost(step: int, group: dist.ProcessGroup | None) -> str:
    """Which ranks of `group` do not say that they have seen an exchange of `step` break off."""
    here = dist.get_rank()
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    silent = _silent([rank for rank in ranks if rank != here], here, f"step {step}")
    if not silent:
        return "all ranks still run, so it is the connection between them that broke"
    names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    return f"{names} did not answer within {ANSWERED_WITHIN_S:.0f} s: lost, or waiting for one that is"


def _silent(others: Sequence[int], here: int, when: str) -> list[int]:
    """Those of the ranks `others` that do not say that they have seen the exchange break off."""
    try:
        store = default_store()
        store.set(_key(when, here), "here")
    except RuntimeError:  # kept by a rank that is gone, which torchrun and Lightning make the first one
        return [rank for rank in others if rank == 0] or list(others)
    deadline = time.monotonic() + ANSWERED_WITHIN_S
    return [rank for rank in others if not _answers(store, _key(when, rank), deadline)]


def _key(when: str, rank: int) -> str:
    return f"genlight/exchange that broke off in {when}/{rank}"


def _answers(store: Any, key: str, deadline: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
    except RuntimeError:
        return False
    return True
