"""Gradients that travel between the ranks together, in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .communication_hooks import CommunicationHook, HookBucket
from .torch_internals import held_by_parameters_alone

__all__ = ["Bucket", "grouped", "read_gradient", "write_gradient"]

BUCKET_BYTES = 25 * 2**20
"""Gradients are averaged in pieces of this size, each on its way while the next is computed (DDP's own default)."""
ON_THEIR_WAY_AT_MOST = 2
"""How many pieces of what rank 0 sends to all are held in memory beside the tensors themselves."""
FIRST_BUCKET_BYTES = 2**20
"""The size of the first piece, so that the exchange begins early (DDP's own default)."""

ALIGNMENT_BYTES = {"cpu": 64}
OTHER_ALIGNMENT_BYTES = 512
"""A gradient begins in the flat tensor where torch's allocators let memory of its own begin, by the type of the device.

Kernels choose by the address how they add up a norm or multiply: elsewhere the bits could be others.
"""

_GRAD: Any = Tensor.grad
read_gradient: Callable[[Tensor], Tensor | None] = _GRAD.__get__
write_gradient: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""What is behind ``tensor.grad``, past the guards of `Accumulation`."""

Gradients = Sequence[Tensor | None]
_Dense = tuple[list[int], list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class _Memory:
    """The flat tensor of a bucket, and its parts.

    Attributes:
        whole: All that travels.
        data: The gradients in it.
        views: Each of them.
        tail: What travels along.
        used: Which parameters have a gradient.
        is_sparse: Which have a sparse one.
        extra: What the caller sends.
    """

    whole: Tensor
    data: Tensor
    views: list[Tensor]
    tail: Tensor
    used: Tensor
    is_sparse: Tensor
    extra: Tensor


class Bucket:
    """Parameters whose gradients travel together, and the flat tensor that they travel in.

    The tensor is kept, as DDP keeps its own: memory that was never touched is several times slower to write. Its tail
    says which parameters have a gradient, so that one that no rank used keeps none, as with one process, and which
    have a sparse one; then comes what the caller wants to send along, which is summed and not averaged.

    With `gradient_as_bucket_view` the averages in it become the gradients, and the next exchange gets new memory. What
    is on its way is therefore never a gradient that backward may still add to, and a gradient that somebody keeps does
    not change.

    Args:
        parameters: Of one dtype, on one device.
        group: Process group; None means all ranks.
        extra: How many numbers are sent along.
        hook: Exchanges the gradients in its own way; the rest is then sent beside them.
        index: What the hook knows this bucket by.
        is_last: Whether it is the last of them.
        gradient_as_bucket_view: Whether averages become gradients where they stand, rather than being copied.
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
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.group = group
        self._world_size = dist.get_world_size(group)
        first = self.parameters[0]
        self.device = first.device
        self._count_extra = extra
        self._gives_views = gradient_as_bucket_view
        self._kept: _Memory | None = None
        self._dense: _Dense = ([], [], [])
        """Positions of the gradients that are dense, these themselves, and where each stands in the flat tensor."""
        self._missing: list[int] = []
        self._sparse: dict[int, int] = {}
        """Positions of sparse gradients, with how many of their dimensions are."""
        self._has_handed_out = False
        """Whether a gradient is part of the flat tensor."""
        self._works: list[Any] = []
        self._averages: torch.futures.Future[Any] | None = None
        """What the hook has promised."""
        self._hook = hook
        self._index, self._is_last = index, is_last
        # One pass over the memory rather than two; what caches hold is faster in two calls than in one for each.
        is_large = sum(p.numel() for p in self.parameters) * first.element_size() > FIRST_BUCKET_BYTES
        self._divides_while_copying = is_large and self.device.type == "cpu" and hook is None
        self.extra = first.new_empty(extra) if self._gives_views else self._memory.extra
        """What is sent along, and then the sums of it."""

    @property
    def _memory(self) -> _Memory:
        if self._kept is None:
            self._kept = _allocated(self.parameters, self._count_extra, is_aligned=self._hook is None)
        return self._kept

    @property
    def is_used(self) -> bool:
        """Whether any rank has a gradient, once what is sent along has arrived."""
        return bool(self._memory.used.real.any())

    def send(self, gradients: Gradients) -> None:
        """Pack the gradients of the parameters and start to average them; `extra` is sent as it is."""
        self.pack(gradients)
        self.send_as_it_is()

    def pack(self, gradients: Gradients) -> None:
        """Write the gradients of the parameters into the flat tensor."""
        memory = self._memory
        self._missing = [i for i, grad in enumerate(gradients) if grad is None]
        self._sparse = {
            i: grad.sparse_dim()
            for i, grad in enumerate(gradients)
            if grad is not None and grad.layout is not torch.strided
        }
        memory.used.fill_(1)
        memory.is_sparse.zero_()
        if self._missing or self._sparse:
            self._dense = self._pack_others(memory, gradients)
        else:
            self._dense = list(range(len(gradients))), cast("list[Tensor]", list(gradients)), memory.views
        _, dense, views = self._dense
        if self.device.type == "cpu" and self._hook is None:  # one pass over the memory rather than two
            for gradient, view in zip(dense, views, strict=True):
                torch.div(gradient, self._world_size, out=view)
        else:
            if dense:
                torch._foreach_copy_(views, dense)
            if self._hook is None:
                memory.data.div_(self._world_size)

    def send_or_take_part(self, gradient_of: Callable[[Tensor], Tensor | None] | None) -> None:
        """Send what `gradient_of` gives for each parameter; None takes part without gradients."""
        if gradient_of is None:
            self.send_as_it_is()
        else:
            self.send([gradient_of(p) for p in self.parameters])

    def send_as_it_is(self) -> None:
        """Take part with whatever the flat tensor holds, where the outcome is not used."""
        if self._hook is None:
            self._take_extra_along()
            self._works.append(dist.all_reduce(self._memory.whole, group=self.group, async_op=True))
        else:
            self.send_tail()
            self.send_by_hook(is_last=self._is_last)

    def send_tail(self) -> None:
        """Start to send what goes along with gradients that a hook exchanges."""
        self._take_extra_along()
        self._works.append(dist.all_reduce(self._memory.tail, group=self.group, async_op=True))

    def send_by_hook(self, *, is_last: bool) -> None:
        """Have the hook exchange the gradients alone."""
        assert self._hook is not None
        self._averages = self._hook(HookBucket(self._index, self._memory.data, self.parameters, is_last))

    def _take_extra_along(self) -> None:
        if self._gives_views and self._count_extra:
            self._memory.extra.copy_(self.extra)

    def _pack_others(self, memory: _Memory, gradients: Gradients) -> _Dense:
        for i in self._missing:
            memory.used[i] = 0
            memory.views[i].zero_()
        for i in self._sparse:
            memory.is_sparse[i] = 1
            memory.views[i].copy_(cast("Tensor", gradients[i]).to_dense())
            if self.device.type == "cpu" and self._hook is None:
                memory.views[i].div_(self._world_size)
        dense = [i for i in range(len(gradients)) if i not in self._sparse and gradients[i] is not None]
        return dense, [cast("Tensor", gradients[i]) for i in dense], [memory.views[i] for i in dense]

    def wait(self) -> None:
        """Until the averages are here; `extra` can be read then."""
        for work in self._works:
            work.wait()
        if self._works and self._gives_views and self._count_extra:
            self.extra.copy_(self._memory.extra)
        self._works.clear()
        future, self._averages = self._averages, None
        if future is not None:
            future.wait()
            result = future.value()
            averages = result if isinstance(result, Tensor) else result[0]
            if averages.data_ptr() != self._memory.data.data_ptr():
                self._memory.data.copy_(averages)

    def land(self) -> dict[int, Tensor]:
        """Make the averages the dense gradients, or write them into these; new gradients of the others, by position."""
        memory = self._memory
        if self._gives_views:
            self._hand_out()
        (_, grads, views), self._dense = self._dense, ([], [], [])
        if grads:
            torch._foreach_copy_(grads, views)
        new = {i: memory.views[i].to_sparse(sparse_dim) for i, sparse_dim in self._sparse.items()}
        if self._missing:
            used, sparse = memory.used.tolist(), memory.is_sparse.tolist()
            for i in self._missing:
                if used[i] > 0:
                    # As an embedding makes it: sparse in its rows. An optimizer for sparse gradients takes no other.
                    new[i] = memory.views[i].to_sparse(1) if sparse[i] > 0 else self._given(memory.views[i])
        if self._has_handed_out:  # never to be written to again
            self._has_handed_out, self._kept = False, None
        return new

    def _hand_out(self) -> None:
        """Let each view take the place of its gradient, unless somebody would see a difference."""
        kept: _Dense = ([], [], [])
        (positions, grads, views), self._dense = self._dense, kept
        are_alone = held_by_parameters_alone(grads)
        for i, grad, view, is_alone in zip(positions, grads, views, are_alone, strict=True):
            parameter = self.parameters[i]
            if is_alone and read_gradient(parameter) is grad and _is_alike(grad, view):
                write_gradient(parameter, self._given(view))
            else:
                kept[0].append(i)
                kept[1].append(grad)
                kept[2].append(view)

    def _given(self, view: Tensor) -> Tensor:
        """What a gradient may be: the view itself, or a copy."""
        self._has_handed_out = self._has_handed_out or self._gives_views
        return view if self._gives_views else view.clone()


def _allocated(parameters: Sequence[Tensor], extra: int, *, is_aligned: bool) -> _Memory:
    """Memory for gradients; what `is_aligned` leaves between them is zero."""
    first, count = parameters[0], len(parameters)
    unit = max(1, _alignment(first.device) // first.element_size()) if is_aligned else 1
    gaps = [-p.numel() % unit for p in parameters]
    pieces = [size for p, gap in zip(parameters, gaps, strict=True) for size in (p.numel(), gap)]
    data_size = sum(pieces)
    whole = torch.empty(data_size + 2 * count + extra, dtype=first.dtype, device=first.device)
    data, tail = whole[:data_size], whole[data_size:]
    split = torch.split(data, pieces)
    for gap in split[1::2]:
        if gap.numel():
            gap.zero_()
    # `.data`: a tensor by itself, with a version counter of its own, as a gradient that backward made.
    views = [piece.view(p.shape).data for piece, p in zip(split[::2], parameters, strict=True)]
    return _Memory(whole, data, views, tail, *torch.split(tail, [count, count, extra]))


def _is_alike(gradient: Tensor, view: Tensor) -> bool:
    """Whether nothing but the address tells `view` from `gradient`; one that was computed with a graph keeps it."""
    return (
        type(gradient) is Tensor
        and gradient.dtype == view.dtype
        and gradient.device == view.device
        and gradient.stride() == view.stride()
        and not gradient.requires_grad
        and not vars(gradient)
        and view.data_ptr() % _alignment(view.device) == 0
    )


def _alignment(device: torch.device) -> int:
    return ALIGNMENT_BYTES.get(device.type, OTHER_ALIGNMENT_BYTES)


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
