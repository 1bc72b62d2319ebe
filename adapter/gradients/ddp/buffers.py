"""Broadcasts from rank 0: weights when training begins, and buffers, such as the running statistics of a BatchNorm.

As with DDP each rank's forward updates its own buffers, and rank 0's count. They are sent when a step ends, as they
are then: any other code finds them equal. Modules without trained weights are no exception (the centre of DINO's loss,
the running statistics of observations, copies with moving averages): replicas are compared with them.

Why they do not travel earlier, with the last bucket of gradients: a forward may follow that exchange, of a target
network or a moving average, on some ranks and not on others. Why they are not awaited later, when the next forward
begins, as DDP does: code between the steps (an evaluation, a checkpoint, a callback) reads them, and a step may read
them past their module, by a tensor that it keeps, by ``torch.func``, in a compiled graph, where nothing notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...discovery.discover import Discovered
from ...discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..rank_check import lost_in_buffers
from ..step_part import StepPart
from .buckets import BUCKET_BYTES

__all__ = ["BufferSync", "broadcast_from_zero"]

ON_THEIR_WAY_AT_MOST = 2
"""How many pieces of what rank 0 sends to all are in memory besides the tensors themselves."""


class BufferSync(StepPart):
    """Sends the buffers of rank 0 at the end of each step, and writes them over those of the other ranks.

    Args:
        discovered: All buffers of its modules are kept equal, whether they are trained or not.
        group: Process group; None means all ranks.
        rank_local: What is each rank's own.
    """

    def __init__(
        self,
        discovered: Discovered,
        group: dist.ProcessGroup | None = None,
        rank_local: RankLocal = EVERYTHING_SHARED,
    ) -> None:
        self._group = group
        self._owners: dict[int, tuple[nn.Module, set[str]]] = {}
        """Modules with buffers, also those that are None still, and the names of those that are the rank's own."""
        for found in discovered.modules:
            for prefix, owner in found.value.named_modules(prefix=found.path):
                if owner._buffers:
                    local = {name for name in owner._buffers if f"{prefix}.{name}" in rank_local}
                    _, at_another_path = self._owners.get(id(owner), (owner, local))
                    self._owners[id(owner)] = owner, local & at_another_path
        self._step = 0

    def __bool__(self) -> bool:
        return any(owner._buffers.keys() - local for owner, local in self._owners.values())

    @override
    def begin(self, step: int) -> None:
        self._step = step

    @override
    def end(self) -> None:
        """Send the buffers of rank 0 as they are; they may have been replaced, resized or cast.

        Raises:
            RankFailedError: Another rank is gone.
        """
        named = ((name in local, b) for owner, local in self._owners.values() for name, b in owner._buffers.items())
        buffers = {id(b): b for is_local, b in named if b is not None and not is_local}
        try:
            broadcast_from_zero(buffers.values(), self._group)
        except RuntimeError as error:
            raise lost_in_buffers(error, self._step, self._group) from error


@torch.no_grad()
def broadcast_from_zero(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` with those of the group's first rank; sharded tensors are left alone."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    on_their_way: deque[tuple[list[Tensor], Tensor, Any]] = deque()
    for message in _messages([t for t in tensors if t.numel() and not isinstance(t, DTensor)]):
        if len(on_their_way) == ON_THEIR_WAY_AT_MOST:
            _take(*on_their_way.popleft())
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in message])
        on_their_way.append((message, flat, dist.broadcast(flat, src=source, group=group, async_op=True)))
    while on_their_way:
        _take(*on_their_way.popleft())


def _take(tensors: list[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    pieces = torch.split(flat, [t.nbytes for t in tensors])
    torch._foreach_copy_(tensors, [piece.view(t.dtype).view(t.shape) for piece, t in zip(pieces, tensors, strict=True)])


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device each, of at most `BUCKET_BYTES` together or one alone.

    The largest elements come first, so that each begins in the flat tensor where its type may begin.
    """
    for device in dict.fromkeys(t.device for t in tensors):
        message: list[Tensor] = []
        size = 0
        for tensor in sorted((t for t in tensors if t.device == device), key=lambda t: -t.element_size()):
            if message and size + tensor.nbytes > BUCKET_BYTES:
                yield message
                message, size = [], 0
            message.append(tensor)
            size += tensor.nbytes
        yield message
