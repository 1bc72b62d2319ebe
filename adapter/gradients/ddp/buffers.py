"""What rank 0 sends to all: weights when training begins, and buffers, such as the running statistics of a BatchNorm.

As with DDP each rank's forward updates its own buffers, and rank 0's count. They are sent where a step ends, as they
are then, and arrive while the loop counts, calls callbacks that look at no weights, and waits for the next batch. Any
other code finds them equal: `settle` comes before it. Under Lightning's loops, in a search and wherever the caller does
not ask for `deferred`, that is the end of the step itself.

Why they do not travel earlier, with the last bucket of gradients: a forward may follow that exchange, of a target
network or a moving average, on some ranks and not on others. Rank 0 alone knows whether its buffers have changed since,
and could not even tell from their versions, which a batch norm does not count up. The others would have to be told,
which is a message like this one. Why they are not awaited later, inside the next forward: a step may read them past
their module, by a tensor that it keeps, by ``torch.func``, in a compiled graph or a CUDA graph, where nothing notices.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ...contract.exceptions import RankFailedError
from ...discovery.discover import Discovered
from ...discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ..step_part import StepPart
from ..torch_internals import NormBase
from .buckets import BUCKET_BYTES, grouped
from .rank_check import lost_in_buffers

__all__ = ["BufferSync", "broadcast_from_zero"]

ON_THEIR_WAY_AT_MOST = 2
"""How many pieces of what rank 0 sends to all are held in memory beside the tensors themselves."""

_Buffer = tuple[Tensor, torch.dtype, torch.Size, torch.device]


class BufferSync(StepPart):
    """Sends the buffers of rank 0 at the end of a step, and writes them over those of the other ranks in `settle`.

    Every rank sends once in each step; when it settles is its own affair, and no other rank waits for it.

    Args:
        discovered: All buffers of trained modules are kept equal; of others (EMA copies), those of norm layers.
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
        self._source = dist.get_global_rank(group, 0) if group is not None else 0
        self._is_source = dist.get_rank(group) == 0
        shared = {id(buffer) for found in discovered.modules for _, buffer in rank_local.buffers(found)}
        owners = [m for found in discovered.trained for m in found.value.modules()]
        owners += [m for found in discovered.untrained for m in found.value.modules() if isinstance(m, NormBase)]
        self._slots = [(owner, name) for owner in owners for name, b in owner._buffers.items() if id(b) in shared]
        self._kept: list[_Message] = []
        """The messages of the last step, whose memory the next one uses again; none where there are many."""
        self._kept_for: list[_Buffer] = []
        self._on_their_way: deque[tuple[_Message, Any]] = deque()
        self._step = 0
        self._running_step = 0
        self._is_deferred = False

    def __bool__(self) -> bool:
        return bool(self._slots)

    @override
    def begin(self, step: int) -> None:
        self._running_step = step
        self.settle()

    @override
    def end(self) -> None:
        self.send(self._running_step)

    @torch.no_grad()
    def send(self, step: int) -> None:
        """A step has ended: send the buffers of rank 0 as they are, and wait for them unless that is `deferred`.

        Args:
            step: Its number, for messages.

        Raises:
            RankFailedError: Another rank is gone.
        """
        self._finish()
        self._step = step
        for message in self._messages():
            if len(self._on_their_way) == ON_THEIR_WAY_AT_MOST:
                self._land(*self._on_their_way.popleft())
            if self._is_source:
                message.pack()
            with self._naming_lost_ranks():
                work = dist.broadcast(message.flat, src=self._source, group=self._group, async_op=True)
            self._on_their_way.append((message, work))
        if not self._is_deferred:
            self._finish()

    def settle(self) -> None:
        """Other code may look: from here on this rank has the buffers of rank 0.

        Rank 0 has them, and waits only where it has to give memory free.

        Raises:
            RankFailedError: Another rank is gone.
        """
        if self._on_their_way and not (self._is_source and self._kept):
            self._finish()

    def let_go(self) -> None:
        """Let go of what is on its way, which may never arrive, and of the memory for it."""
        self._on_their_way.clear()
        self._kept, self._kept_for = [], []

    @contextlib.contextmanager
    def deferred(self) -> Iterator[Callable[[], None]]:
        """Buffers may be on their way between the steps inside; gives `settle`, to be called before other code.

        A loop that fails or is stopped leaves equal buffers as well, as far as rank 0 can still send its own. An
        interrupt from the keyboard waits for nothing.
        """
        self._is_deferred = True
        try:
            yield self.settle
        except KeyboardInterrupt:
            self.let_go()
            raise
        except BaseException as error:
            try:
                self._finish()
            except RankFailedError as second:  # what ends the run is the first one
                error.add_note(str(second))
            raise
        else:
            self._finish()
        finally:
            self._is_deferred = False

    @torch.no_grad()
    def _finish(self) -> None:
        while self._on_their_way:
            self._land(*self._on_their_way.popleft())

    def _land(self, message: _Message, work: Any) -> None:
        with self._naming_lost_ranks():
            work.wait()
        if not self._is_source:
            message.unpack()

    @contextlib.contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.let_go()
            raise lost_in_buffers(error, self._step, self._source, self._group) from error

    def _messages(self) -> Iterator[_Message]:
        found = (owner._buffers.get(name) for owner, name in self._slots)
        buffers = [b for b in found if b is not None and b.numel() and not isinstance(b, DTensor)]
        if self._kept and _are_still(self._kept_for, buffers):
            yield from self._kept
            return
        self._kept, self._kept_for = [], []
        groups = _grouped(buffers)
        if sum(map(_bytes_of, buffers)) > ON_THEIR_WAY_AT_MOST * BUCKET_BYTES:
            yield from map(_Message, groups)
            return
        self._kept = [_Message(group) for group in groups]
        self._kept_for = [(b, b.dtype, b.shape, b.device) for b in buffers]
        yield from self._kept


class _Message:
    """Buffers of one device, and their bytes in one flat tensor."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        sizes = list(map(_bytes_of, buffers))
        self.flat = torch.empty(sum(sizes), dtype=torch.uint8, device=buffers[0].device)
        pieces = torch.split(self.flat, sizes)
        views = [piece.view(b.dtype).view(b.shape) for piece, b in zip(pieces, buffers, strict=True)]
        pairs = list(zip(buffers, views, strict=True))
        # A GPU copies those of one type in one call.
        self._by_type = [
            ([b for b, _ in pairs if b.dtype == dtype], [view for _, view in pairs if view.dtype == dtype])
            for dtype in dict.fromkeys(b.dtype for b in buffers)
        ]

    def pack(self) -> None:
        """Write the buffers into the flat tensor."""
        for buffers, views in self._by_type:
            torch._foreach_copy_(views, buffers)

    def unpack(self) -> None:
        """Write over the buffers what the flat tensor holds."""
        for buffers, views in self._by_type:
            torch._foreach_copy_(buffers, views)


def _bytes_of(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _are_still(known: Sequence[_Buffer], buffers: Sequence[Tensor]) -> bool:
    """Whether these are the buffers that were known; they may have been replaced, resized or cast."""
    return len(known) == len(buffers) and all(
        b is same and b.dtype is dtype and b.shape == shape and b.device == device
        for b, (same, dtype, shape, device) in zip(buffers, known, strict=True)
    )


def _grouped(buffers: Sequence[Tensor]) -> list[list[Tensor]]:
    """Buffers of one device each, of at most `BUCKET_BYTES` together or one alone.

    The largest elements come first, so that each begins in the flat tensor where its type may begin.
    """
    groups: list[list[Tensor]] = []
    for device in dict.fromkeys(b.device for b in buffers):
        size = 0
        for buffer in sorted((b for b in buffers if b.device == device), key=lambda b: -b.element_size()):
            own = _bytes_of(buffer)
            if size == 0 or size + own > BUCKET_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(buffer)
            size += own
    return groups


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
