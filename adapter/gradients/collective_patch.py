"""Where torch's collectives are touched: what a trainer sends to other ranks itself waits for its gradients first.

A rank that reads a gradient has all ranks average. One that meanwhile waits for it in a collective of the trainer's
own would wait for ever, so gradients are averaged before any such call. The functions of ``torch.distributed`` are
replaced for the length of a training on several ranks, and put back after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["COLLECTIVES", "patch", "restore"]

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier", "gather", "scatter"),
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send", "recv", "batch_isend_irecv"),
)
"""The functions of ``torch.distributed`` that wait for other ranks; not all of them are there in every release.

Not `isend` and `irecv`, which do not wait: a ``P2POp`` takes these very functions, and tells them apart by identity.
"""

_found: list[tuple[Any, str, Any]] = []


def patch(before: Callable[[str], None]) -> None:
    """Call `before` with the name of each function of ``torch.distributed`` that waits for other ranks, before it."""
    if not dist.is_available():
        return
    for owner in (dist, dist.distributed_c10d):
        for name in COLLECTIVES:
            function = getattr(owner, name, None)
            if function is not None:
                _found.append((owner, name, function))
                setattr(owner, name, _after(before, name, function))


def restore() -> None:
    """Leave torch as it was before `patch`."""
    while _found:
        owner, name, function = _found.pop()
        setattr(owner, name, function)


def _after(before: Callable[[str], None], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a graph that holds a collective stays whole
            before(name)
        return function(*args, **kwargs)

    return patched
