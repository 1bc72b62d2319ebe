"""Gradients that travel between the ranks together, in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ....callbacks.lightning_internals import ddp_settings

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "Bucket", "grouped", "wire_type"]

BUCKET_BYTES = 25 * 2**20
"""Gradients are averaged in pieces of this size, each on its way while the next is computed (DDP's own default)."""
FIRST_BUCKET_BYTES = 2**20
"""The size of the first piece, so that the exchange begins early (DDP's own default)."""

ALIGNMENT_BYTES = {"cpu": 64}
OTHER_ALIGNMENT_BYTES = 512
"""A gradient begins in the flat tensor where torch's allocators let memory of its own begin, by the type of the device.

Kernels choose by the address how they add up a norm or multiply: elsewhere the bits could be others.
"""

WIRE_TYPES = {"allreduce_hook": None, "fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}
"""Torch's communication hooks that do no more than send gradients in another type."""

Gradients = Sequence[Tensor | None]


class Bucket:
    """Parameters whose gradients travel together, and the flat tensor that they travel in.

    The tensor is kept, as DDP keeps its own: memory that was never touched is several times slower to write. Its tail
    says which parameters have a gradient, so that one that no rank used keeps none, as with one process; then comes
    what the caller wants to send along, which is summed and not averaged.

    Args:
        parameters: Of one dtype, on one device.
        group: Process group; None means all ranks.
        extra: How many numbers are sent along.
        wire: The type in which gradients travel; None means their own.

    Attributes:
        extra: What is sent along, and then the sums of it.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        extra: int = 0,
        wire: torch.dtype | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._group = group
        self._world_size = dist.get_world_size(group)
        first, count = self.parameters[0], len(self.parameters)
        dtype = wire or first.dtype
        alignment = ALIGNMENT_BYTES.get(first.device.type, OTHER_ALIGNMENT_BYTES)
        unit = max(1, alignment // dtype.itemsize)
        pieces = [size for p in self.parameters for size in (p.numel(), -p.numel() % unit)]
        self._whole = torch.zeros(sum(pieces) + count + extra, dtype=dtype, device=first.device)
        *flat, self._used, self.extra = torch.split(self._whole, [*pieces, count, extra])
        self._gradients = self._whole[: sum(pieces)]
        self._views = [piece.view(p.shape) for piece, p in zip(flat[::2], self.parameters, strict=True)]
        self._divides_while_it_packs = first.device.type == "cpu" and wire is None
        self._missing: list[int] = []
        self._sent: tuple[list[Tensor], list[Tensor]] = ([], [])
        """This rank's gradients, and where each stands in the flat tensor."""
        self._work: Any = None

    @torch.no_grad()
    def send(self, gradients: Gradients) -> None:
        """Pack the gradients of the parameters and start to average them; `extra` is sent as it is."""
        self._missing = [i for i, gradient in enumerate(gradients) if gradient is None]
        self._used.fill_(1)
        for i in self._missing:
            self._used[i] = 0
            self._views[i].zero_()
        pairs = [(g, view) for g, view in zip(gradients, self._views, strict=True) if g is not None]
        grads, views = self._sent = [g for g, _ in pairs], [view for _, view in pairs]
        if self._divides_while_it_packs:  # one pass over the memory rather than two
            for gradient, view in pairs:
                torch.div(gradient, self._world_size, out=view)
        else:
            if grads:
                torch._foreach_copy_(views, grads)
            self._gradients.div_(self._world_size)
        self.take_part()

    def take_part(self) -> None:
        """Send whatever the flat tensor has, where the outcome is not used, but for `extra`."""
        self._work = dist.all_reduce(self._whole, group=self._group, async_op=True)

    def wait(self) -> None:
        """Until the averages are here, as far as the device is; `extra` can be read then."""
        self._work.wait()

    @torch.no_grad()
    def land(self, read: Callable[[Tensor], list[float]]) -> dict[int, Tensor]:
        """Write the averages into this rank's gradients; new ones where it has none and another rank has, by position.

        Args:
            read: Gives numbers of a device; called only where this rank lacks a gradient.
        """
        (grads, views), self._sent = self._sent, ([], [])
        if grads:
            torch._foreach_copy_(grads, views)
        used = read(self._used) if self._missing else []
        return {i: self._views[i].to(self.parameters[i].dtype, copy=True) for i in self._missing if used[i] > 0}


def grouped(
    tensors: Sequence[Tensor], full_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> Iterator[list[Tensor]]:
    """`tensors`, in their order, in groups of one kind, as DDP makes its buckets.

    A group is complete once it has reached its size, so that the tensor that reaches it belongs to it: one more message
    costs more than a larger one.

    Args:
        tensors: On any devices, of any dtypes.
        full_bytes: Size at which a group is complete.
        first_bytes: The same for the first group of each kind, where that is less.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    limits: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        group = groups.setdefault(kind, [])
        group.append(tensor)
        if sum(t.nbytes for t in group) >= limits.get(kind, min(first_bytes, full_bytes)):
            yield groups.pop(kind)
            limits[kind] = full_bytes
    yield from groups.values()


def wire_type(strategy: Any) -> torch.dtype | None:
    """The type in which `strategy` has gradients travel; None means their own.

    Raises:
        ValueError: Its communication hook does something else; says what, and the way out.
    """
    if not isinstance(strategy, DDPStrategy):
        return None
    settings = ddp_settings(strategy)
    hook, wrapper = settings.communication_hook, settings.communication_wrapper
    if hook is None:
        return None
    name = getattr(hook, "__name__", type(hook).__name__)
    is_plain = wrapper is None and settings.communication_state is None
    if is_plain and getattr(hook, "__module__", "").startswith("torch.") and name in WIRE_TYPES:
        return WIRE_TYPES[name]
    what = name if wrapper is None else f"{getattr(wrapper, '__name__', 'a wrapper')}({name})"
    raise ValueError(
        f"{what} exchanges gradients in its own way, and genlight exchanges them itself. Use one of "
        f"{', '.join(WIRE_TYPES)} without a wrapper and a state, or none"
    )
