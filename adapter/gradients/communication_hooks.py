"""Hooks that exchange a bucket in a way of their own, such as in half precision: ``DDPStrategy(ddp_comm_hook=…)``.

They are written for the buckets of ``DistributedDataParallel`` (`torch's page on them
<https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html>`_), which only its own reducer can make. `HookBucket` has the
same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ...callbacks.lightning_internals import ddp_settings
from .hook_state import is_hook_state

__all__ = ["CommunicationHook", "HookBucket", "communication_hook"]


@dataclass(frozen=True)
class CommunicationHook:
    """A hook as it was given to a strategy.

    Attributes:
        function: Takes `state` and a bucket with the sums of this rank's gradients; gives a future of their averages.
        state: Nothing, the process group that the hook uses, or what it keeps from exchange to exchange.
    """

    function: Callable[[Any, Any], Any]
    state: Any

    @property
    def keeps_state(self) -> bool:
        """Whether what it computes depends on what it was given before."""
        return is_hook_state(self.state)

    def __call__(self, bucket: HookBucket) -> torch.futures.Future[Any]:
        """Start to exchange `bucket`."""
        return self.function(self.state, bucket)  # type: ignore[no-any-return]


@dataclass
class HookBucket:
    """What ``torch.distributed.GradBucket`` is to a hook."""

    _index: int
    _buffer: Tensor
    _parameters: Sequence[Tensor]
    _is_last: bool

    def index(self) -> int:
        """A number that the same parameters always have: their position among the buckets, where all are trained."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, one after the other."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The gradients, each a view of the buffer."""
        pieces = torch.split(self._buffer, [p.numel() for p in self._parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """What the gradients belong to, in the same order."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no other bucket of this exchange follows."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put `buffer`, which may be of another dtype, in the place of the buffer."""
        self._buffer = buffer


def communication_hook(strategy: Any) -> CommunicationHook | None:
    """What `strategy` was given, its wrapper applied; None where it exchanges gradients as usual."""
    if not isinstance(strategy, DDPStrategy):
        return None
    settings = ddp_settings(strategy)
    function = settings.communication_hook
    if function is None:
        return None
    if settings.communication_wrapper is not None:
        function = settings.communication_wrapper(function)
    return CommunicationHook(function, settings.communication_state)
