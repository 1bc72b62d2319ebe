"""Buckets: flat tensors in which several gradients are averaged over the ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ....callbacks.lightning_internals import ddp_settings

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket; one is exchanged while the gradients of the next are computed (the default of DDP)."""
FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket, so that the exchange begins early (the default of DDP)."""

ALIGNMENT_BYTES = {"cpu": 64}
OTHER_ALIGNMENT_BYTES = 512
"""Alignment of a gradient in the flat tensor by the type of the device, equal to that in torch's allocators.

Kernels choose by the address how they add up a norm or multiply: other alignments could change bits of results.
"""

WIRE_TYPES = {"allreduce_hook": None, "fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}
"""Torch's communication hooks that only send gradients in another type, and that type."""

Gradients = Sequence[Tensor | None]


class Bucket:
    """Parameters whose gradients are averaged together, and the flat tensor in which they are sent.

    The tensor is kept, as in DDP: memory that was never touched is several times slower to write. After the gradients,
    it has a flag per parameter that tells whether this rank has a gradient: a parameter that no rank used gets none, as
    with one process. Extra numbers of the caller follow; they are summed, not averaged.

    Args:
        parameters: Parameters of one dtype, on one device.
        group: Process group; None means all ranks.
        extra: Count of extra numbers.
        wire: Type in which gradients are sent; None keeps their type.

    Attributes:
        extra: The extra numbers, and their sums after the exchange.
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
        """This rank's gradients, and the view of each in the flat tensor."""
        self._work: Any = None

    @torch.no_grad()
    def send(self, gradients: Gradients) -> None:
        """Pack the gradients of the parameters and start to average them; `extra` is not changed before it is sent."""
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
        self.send_unchanged()

    def send_unchanged(self) -> None:
        """Send the flat tensor with its present contents; by itself only useful for `extra`."""
        self._work = dist.all_reduce(self._whole, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait until the averages and `extra` have arrived; on a device, only the stream waits."""
        self._work.wait()

    @torch.no_grad()
    def unpack(self, read: Callable[[Tensor], list[float]]) -> dict[int, Tensor]:
        """Write the averages into this rank's gradients.

        Args:
            read: Reads the numbers of a tensor on a device; called only if this rank lacks a gradient.

        Returns:
            New gradients, by position, for the parameters without one on this rank but with one on another.
        """
        (grads, views), self._sent = self._sent, ([], [])
        if grads:
            torch._foreach_copy_(grads, views)
        used = read(self._used) if self._missing else []
        return {i: self._views[i].to(self.parameters[i].dtype, copy=True) for i in self._missing if used[i] > 0}


def grouped(
    tensors: Sequence[Tensor], full_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> Iterator[list[Tensor]]:
    """Yield `tensors`, in order, in groups of one device and dtype, as DDP makes its buckets.

    The tensor with which a group reaches its size still belongs to it: an additional message costs more than a larger
    one.

    Args:
        tensors: Tensors on any devices, of any dtypes.
        full_bytes: Size at which a group is complete.
        first_bytes: Size at which the first group of each kind is complete, if that is less.
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
    """Return the type in which `strategy` sends gradients; None if it keeps their type.

    Raises:
        ValueError: Its communication hook does something else; the message has the way out.
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
        f"{what} exchanges gradients in its own way, but genlight exchanges them itself. Use one of "
        f"{', '.join(WIRE_TYPES)} without a wrapper and a state, or none"
    )
