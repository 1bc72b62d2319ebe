"""Gradients that travel between the ranks together, in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .communication_hooks import CommunicationHook, HookBucket

__all__ = ["Bucket", "grouped", "read_gradient", "write_gradient"]

BUCKET_BYTES = 25 * 2**20
"""Gradients are averaged in pieces of this size, each on its way while the next is computed (DDP's own default)."""
FIRST_BUCKET_BYTES = 2**20
"""The size of the first piece, so that the exchange begins early (DDP's own default)."""

_GRAD: Any = Tensor.grad
read_gradient: Callable[[Tensor], Tensor | None] = _GRAD.__get__
write_gradient: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""What is behind ``tensor.grad``, past the guards of `Accumulation`."""

Gradients = Sequence[Tensor | None]


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
        sizes = [*(p.numel() for p in self.parameters), count, count, extra]
        self._flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        *pieces, self._used, self._is_sparse, self.extra = torch.split(self._flat, sizes)
        data = sum(sizes[:-3])
        self._data, self._tail = self._flat[:data], self._flat[data:]
        self._views = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        self._dense: tuple[list[Tensor], list[Tensor]] = ([], [])
        """The gradients that are dense, and where each stands in the flat tensor."""
        self._missing: list[int] = []
        self._sparse: list[int] = []
        self._gradients: Gradients = ()
        self._works: list[Any] = []
        self._averages: torch.futures.Future[Any] | None = None
        """What the hook has promised."""
        self._hook = hook
        self._index, self._is_last = index, is_last

    @property
    def is_used(self) -> bool:
        """Whether any rank has a gradient, once what is sent along has arrived."""
        return bool(self._used.real.any())

    def send(self, gradients: Gradients) -> None:
        """Pack the gradients of the parameters and start to average them; `extra` is sent as it is."""
        self.pack(gradients)
        self.send_as_it_is()

    def pack(self, gradients: Gradients) -> None:
        """Write the gradients of the parameters into the flat tensor."""
        self._gradients = gradients
        self._missing = [i for i, grad in enumerate(gradients) if grad is None]
        self._sparse = [i for i, grad in enumerate(gradients) if grad is not None and grad.layout is not torch.strided]
        self._used.fill_(1)
        self._is_sparse.zero_()
        if self._missing or self._sparse:
            self._pack_others()
        else:
            self._dense = cast("list[Tensor]", list(gradients)), self._views
        if self.device.type == "cpu" and self._hook is None:  # one pass over the memory rather than two
            for gradient, view in zip(*self._dense, strict=True):
                torch.div(gradient, self._world_size, out=view)
        else:
            if self._dense[0]:
                torch._foreach_copy_(self._dense[1], self._dense[0])
            if self._hook is None:
                self._data.div_(self._world_size)

    def send_or_take_part(self, gradient_of: Callable[[Tensor], Tensor | None] | None) -> None:
        """Send what `gradient_of` gives for each parameter; None takes part without gradients."""
        if gradient_of is None:
            self.send_as_it_is()
        else:
            self.send([gradient_of(p) for p in self.parameters])

    def send_as_it_is(self) -> None:
        """Take part with whatever the flat tensor holds, where the outcome is not used."""
        if self._hook is None:
            self._works.append(dist.all_reduce(self._flat, group=self.group, async_op=True))
        else:
            self.send_tail()
            self.send_by_hook(is_last=self._is_last)

    def send_tail(self) -> None:
        """Start to send what goes along with gradients that a hook exchanges."""
        self._works.append(dist.all_reduce(self._tail, group=self.group, async_op=True))

    def send_by_hook(self, *, is_last: bool) -> None:
        """Have the hook exchange the gradients alone."""
        assert self._hook is not None
        self._averages = self._hook(HookBucket(self._index, self._data, self.parameters, is_last))

    def _pack_others(self) -> None:
        for i in self._missing:
            self._used[i] = 0
            self._views[i].zero_()
        for i in self._sparse:
            self._is_sparse[i] = 1
            self._views[i].copy_(cast("Tensor", self._gradients[i]).to_dense())
            if self.device.type == "cpu" and self._hook is None:
                self._views[i].div_(self._world_size)
        others = {*self._missing, *self._sparse}
        pairs = enumerate(zip(self._gradients, self._views, strict=True))
        dense = [(cast("Tensor", grad), view) for i, (grad, view) in pairs if i not in others]
        self._dense = [grad for grad, _ in dense], [view for _, view in dense]

    def wait(self) -> None:
        """Until the averages are here; `extra` can be read then."""
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

    def land(self) -> dict[int, Tensor]:
        """Write the averages into the dense gradients; the new gradients of other parameters, by position."""
        (grads, views), self._dense = self._dense, ([], [])
        if grads:
            torch._foreach_copy_(grads, views)
        given, self._gradients = self._gradients, ()
        new = {i: self._views[i].to_sparse(cast("Tensor", given[i]).sparse_dim()) for i in self._sparse}
        if self._missing:
            used, sparse = self._used.tolist(), self._is_sparse.tolist()
            for i in self._missing:
                if used[i] > 0:
                    # As an embedding makes it: sparse in its rows. An optimizer for sparse gradients takes no other.
                    new[i] = self._views[i].to_sparse(1) if sparse[i] > 0 else self._views[i].clone()
        return new


def grouped(
    tensors: Sequence[Tensor], most_bytes: int | None = None, first_bytes: int | None = None
) -> Iterator[list[Tensor]]:
    """`tensors` in groups of one kind.

    Args:
        tensors: Come in their order.
        most_bytes: Of a group with several tensors; None means `BUCKET_BYTES`.
        first_bytes: Of the first group of each kind, where that is less.
    """
    most = BUCKET_BYTES if most_bytes is None else most_bytes
    first = most if first_bytes is None else min(first_bytes, most)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    limits: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        if kind in groups and sizes[kind] + size > limits.setdefault(kind, first):
            yield groups.pop(kind)
            limits[kind] = most
        sizes[kind] = sizes[kind] + size if kind in groups else size
        groups.setdefault(kind, []).append(tensor)
    yield from groups.values()
