"""Gradients that travel between the ranks together, in flat tensors, and hooks that exchange these in their own way.

Hooks are those of ``DDPStrategy(ddp_comm_hook=…)``, such as ``fp16_compress_hook``. They are written for the buckets of
``DistributedDataParallel`` (`torch's page on them <https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html>`_), which
only its own reducer can make; `HookBucket` has the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ....callbacks.lightning_internals import ddp_settings

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "CommunicationHook",
    "HookBucket",
    "communication_hook",
    "fault_of_hook",
    "grouped",
]

BUCKET_BYTES = 25 * 2**20
"""Gradients are averaged in pieces of this size, each on its way while the next is computed (DDP's own default)."""
FIRST_BUCKET_BYTES = 2**20
"""The size of the first piece, so that the exchange begins early (DDP's own default)."""

ALIGNMENT_BYTES = {"cpu": 64}
OTHER_ALIGNMENT_BYTES = 512
"""A gradient begins in the flat tensor where torch's allocators let memory of its own begin, by the type of the device.

Kernels choose by the address how they add up a norm or multiply: elsewhere the bits could be others.
"""

Gradients = Sequence[Tensor | None]
CommunicationHook = Callable[["HookBucket"], "torch.futures.Future[Any]"]
"""Takes a bucket with the sums of this rank's gradients; gives a future of their averages."""


class Bucket:
    """Parameters whose gradients travel together, and the flat tensor that they travel in.

    The tensor is kept, as DDP keeps its own: memory that was never touched is several times slower to write. Its tail
    says which parameters have a gradient, so that one that no rank used keeps none, as with one process, and which
    have a sparse one; then comes what the caller wants to send along, which is summed and not averaged.

    Args:
        parameters: Of one dtype, on one device.
        group: Process group; None means all ranks.
        extra: How many numbers are sent along.
        hook: Exchanges the gradients in its own way; the rest is then sent beside them.
        index: What the hook knows this bucket by.
        is_last: Whether it is the last of them.

    Attributes:
        extra: What is sent along, and then the sums of it.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        extra: int = 0,
        *,
        hook: CommunicationHook | None = None,
        index: int = 0,
        is_last: bool = True,
    ) -> None:
        self.parameters = list(parameters)
        self.group = group
        self._world_size = dist.get_world_size(group)
        first, count = self.parameters[0], len(self.parameters)
        self.device = first.device
        unit = 1 if hook is not None else max(1, _alignment(first.device) // first.element_size())
        gaps = [-p.numel() % unit for p in self.parameters]
        pieces = [size for p, gap in zip(self.parameters, gaps, strict=True) for size in (p.numel(), gap)]
        data_size = sum(pieces)
        self._whole = torch.empty(data_size + 2 * count + extra, dtype=first.dtype, device=first.device)
        self._data, self._tail = self._whole[:data_size], self._whole[data_size:]
        split = torch.split(self._data, pieces)
        for gap in split[1::2]:
            if gap.numel():
                gap.zero_()
        self._views = [piece.view(p.shape) for piece, p in zip(split[::2], self.parameters, strict=True)]
        self._used, self._is_sparse, self.extra = torch.split(self._tail, [count, count, extra])
        self.extra.zero_()
        self._dense: tuple[list[Tensor], list[Tensor]] = ([], [])
        """The gradients that are dense, and where each stands in the flat tensor."""
        self._missing: list[int] = []
        self._sparse: dict[int, int] = {}
        """Positions of sparse gradients, with how many of their dimensions are."""
        self._works: list[Any] = []
        self._averages: torch.futures.Future[Any] | None = None
        """What the hook has promised."""
        self._hook, self._index, self._is_last = hook, index, is_last

    @torch.no_grad()
    def send(self, gradients: Gradients) -> None:
        """Pack the gradients of the parameters and start to average them; `extra` is sent as it is."""
        self._missing = [i for i, grad in enumerate(gradients) if grad is None]
        self._sparse = {
            i: grad.sparse_dim()
            for i, grad in enumerate(gradients)
            if grad is not None and grad.layout is not torch.strided
        }
        self._used.fill_(1)
        self._is_sparse.zero_()
        if self._missing or self._sparse:
            self._dense = self._pack_others(gradients)
        else:
            self._dense = cast("list[Tensor]", list(gradients)), self._views
        dense, views = self._dense
        if self.device.type == "cpu" and self._hook is None:  # one pass over the memory rather than two
            for gradient, view in zip(dense, views, strict=True):
                torch.div(gradient, self._world_size, out=view)
        else:
            if dense:
                torch._foreach_copy_(views, dense)
            if self._hook is None:
                self._data.div_(self._world_size)
        self.take_part()

    def take_part(self) -> None:
        """Send whatever the flat tensor holds, where the outcome is not used, but for `extra`."""
        sent = self._whole if self._hook is None else self._tail
        self._works.append(dist.all_reduce(sent, group=self.group, async_op=True))
        if self._hook is not None:
            self._averages = self._hook(HookBucket(self._index, self._data, self.parameters, self._is_last))

    def _pack_others(self, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
        for i in self._missing:
            self._used[i] = 0
            self._views[i].zero_()
        for i in self._sparse:
            self._is_sparse[i] = 1
            self._views[i].copy_(cast("Tensor", gradients[i]).to_dense())
            if self.device.type == "cpu" and self._hook is None:
                self._views[i].div_(self._world_size)
        dense = [i for i in range(len(gradients)) if i not in self._sparse and gradients[i] is not None]
        return [cast("Tensor", gradients[i]) for i in dense], [self._views[i] for i in dense]

    def wait(self) -> None:
        """Until the averages are here, as far as the device is; `extra` can be read then."""
        for work in self._works:
            work.wait()
        self._works.clear()
        future, self._averages = self._averages, None
        if future is not None:
            future.wait()
            result = future.value()
            averages = result if isinstance(result, Tensor) else result[0]
            if averages.data_ptr() != self._data.data_ptr():
                self._data.copy_(averages)

    @torch.no_grad()
    def land(self, read: Callable[[Tensor], list[float]]) -> dict[int, Tensor]:
        """Write the averages into the dense gradients; new gradients of the others, by position.

        Args:
            read: Gives numbers of a device; called only where this rank lacks a gradient that another one may have.
        """
        (grads, views), self._dense = self._dense, ([], [])
        if grads:
            torch._foreach_copy_(grads, views)
        new = {i: self._views[i].to_sparse(sparse_dim) for i, sparse_dim in self._sparse.items()}
        if self._missing:
            numbers, count = read(self._tail[: 2 * len(self.parameters)]), len(self.parameters)
            for i in self._missing:
                if numbers[i] > 0:
                    # As an embedding makes it: sparse in its rows. An optimizer for sparse gradients takes no other.
                    new[i] = self._views[i].to_sparse(1) if numbers[count + i] > 0 else self._views[i].clone()
        return new


def _alignment(device: torch.device) -> int:
    return ALIGNMENT_BYTES.get(device.type, OTHER_ALIGNMENT_BYTES)


def grouped(
    tensors: Sequence[Tensor], most_bytes: int = BUCKET_BYTES, first_bytes: int | None = None
) -> Iterator[list[Tensor]]:
    """`tensors` in groups of one kind.

    Args:
        tensors: Come in their order.
        most_bytes: Of a group with several tensors.
        first_bytes: Of the first group of each kind, where that is less.
    """
    first = most_bytes if first_bytes is None else min(first_bytes, most_bytes)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    limits: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        if kind in groups and sizes[kind] + size > limits.setdefault(kind, first):
            yield groups.pop(kind)
            limits[kind] = most_bytes
        sizes[kind] = sizes[kind] + size if kind in groups else size
        groups.setdefault(kind, []).append(tensor)
    yield from groups.values()


@dataclass
class HookBucket:
    """What ``torch.distributed.GradBucket`` is to a hook."""

    _index: int
    _buffer: Tensor
    _parameters: Sequence[Tensor]
    _is_last: bool

    def index(self) -> int:
        """A number that the same parameters always have: their position among the buckets."""
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
    function, state = settings.communication_hook, settings.communication_state
    if function is None:
        return None
    if settings.communication_wrapper is not None:
        function = settings.communication_wrapper(function)
    return lambda bucket: function(state, bucket)


def fault_of_hook(strategy: DDPStrategy) -> str | None:
    """Why a run with this strategy's hook could not be hosted, and the way out; None where it can."""
    state = ddp_settings(strategy).communication_state
    if state is None or isinstance(state, dist.ProcessGroup):
        return None
    return (
        f"its communication hook keeps a {type(state).__name__} between steps, which no checkpoint would hold, so that "
        "no resume would be exact. Use a hook without state (fp16_compress_hook, bf16_compress_hook), or none"
    )
