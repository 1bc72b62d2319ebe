"""Writes to shards: since when gathered weights are stale, and what was written to a ``state_dict()``.

The tensors of a module's ``state_dict()`` are in torch the weights themselves.
Many an EMA, and the copy of a target network, is written as ``target.state_dict()[name].copy_(value)``. Of a sharded
module the tensors are put together for the caller, so what is written to them has to be brought to the shards.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ....callbacks.checkpoint.sharded.boxes import Box, slice_of
from ....callbacks.checkpoint.sharded.lazy_tensor import WholeTensor

__all__ = ["changed", "changes", "count", "gave", "settle", "settle_all"]

_changes = 0
_is_counting = False


@dataclass
class _Given:
    """A whole tensor that the trainer got; held so that it outlives a loop over the values of the state dict."""

    whole: Tensor
    version: int
    parameter: weakref.ref[DTensor]
    slice_before: Tensor | None
    """What this rank holds of it; a write through ``.data`` leaves no other trace. None once that was looked at."""


_given: list[_Given] = []


def changed() -> None:
    """Shards were changed, or may have been."""
    global _changes
    _changes += 1


def count(counting: bool) -> None:
    """From now on writes to shards are told by `changed`, or are not."""
    global _is_counting
    _is_counting = counting


def changes() -> int:
    """How often shards were changed, as far as is known; what was gathered before is stale."""
    if not _is_counting:
        changed()
    return _changes


def gave(parameter: Tensor, whole: Tensor) -> None:
    """The trainer got `whole` for `parameter`."""
    if isinstance(parameter, DTensor) and not isinstance(whole, DTensor | WholeTensor):
        local = parameter._local_tensor.detach().clone()
        _given.append(_Given(whole, whole._version, weakref.ref(parameter), local))


def settle() -> None:
    """Bring to the shards what was written, as far as torch counts it; cheap enough for each use of a shard."""
    for entry in _given:
        if entry.whole._version != entry.version:
            _bring(entry)


def settle_all() -> None:
    """Bring all that was written to the shards before they are used, and let go of what the trainer does not keep."""
    if not _given:
        return
    for entry in _given:
        if entry.whole._version != entry.version or entry.slice_before is not None:
            _bring(entry)
    _given[:] = [entry for entry in _given if sys.getrefcount(entry.whole) > _OURS]


_OURS = 2
"""References to a tensor that only `_Given` holds, that of the call which counts them included."""


@torch.no_grad()
def _bring(entry: _Given) -> None:
    parameter, entry.version = entry.parameter(), entry.whole._version
    before, entry.slice_before = entry.slice_before, None
    if parameter is None:
        return
    whole = Box((0,) * entry.whole.dim(), tuple(entry.whole.shape))
    part = slice_of(parameter).within(entry.whole, of=whole)
    if before is None or not torch.equal(part, before):
        parameter._local_tensor.copy_(part)
        changed()
