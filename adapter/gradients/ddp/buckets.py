"""Selects the gradients that are averaged, and packs them into buckets: flat tensors that are exchanged as one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ....callbacks.lightning_internals import ddp_settings
from ....callbacks.optimizer_state import parameters_of
from ...discovery.discover import Discovered, Found
from ...discovery.rank_local import RankLocal
from ..rank_check import CHECKSUMS, NUMBERS
from ..torch_hooks import read_gradient
from ..torch_internals import group_timeout

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket, the default of DDP. A bucket is exchanged while the gradients of the next one are computed."""
FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket, so that the exchange begins early (the default of DDP)."""

ALIGNMENT_BYTES = {"cpu": 64}
OTHER_ALIGNMENT_BYTES = 512
"""Alignment of a gradient in the flat tensor by the type of the device, as torch's allocators align tensors.

The address of a tensor decides how kernels multiply and add up a norm, so another alignment could change bits of
results.
"""

SMALL_NUMBERS = 8192
"""Average elements per gradient below which a call for each gradient costs more than a second pass over the memory."""

WIRE_TYPES = {"allreduce_hook": None, "fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}
"""Torch's communication hooks that only send gradients in another type, and that type."""

Gradients = Sequence[Tensor | None]


class Bucket:
    """Parameters whose gradients are averaged together, and the flat tensor in which they are sent.

    The flat tensor is kept between exchanges, as in DDP, since writing to new memory is several times slower. After the
    gradients, it has a flag per parameter: whether this rank has a gradient. A parameter that no rank used gets no
    gradient, as with one process. Extra numbers of the caller follow; they are summed, not averaged.

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
        is_large = sum(p.numel() for p in self.parameters) >= SMALL_NUMBERS * count
        self._divides_while_it_packs = first.device.type == "cpu" and wire is None and is_large
        self._missing: list[int] = []
        self._sent: tuple[list[Tensor], list[Tensor]] = ([], [])
        """This rank's gradients, and the view of each in the flat tensor."""
        self._work: Any = None

    @torch.no_grad()
    def send(self, gradients: Gradients) -> None:
        """Pack the gradients of the parameters and start to average them; `extra` is sent as it is."""
        self._missing = [i for i, gradient in enumerate(gradients) if gradient is None]
        self._used.fill_(1)
        for i in self._missing:
            self._used[i] = 0
            self._views[i].zero_()
        grads = [g for g in gradients if g is not None]
        views = [view for g, view in zip(gradients, self._views, strict=True) if g is not None]
        self._sent = grads, views
        if self._divides_while_it_packs:  # one pass over the memory rather than two
            for gradient, view in zip(grads, views, strict=True):
                torch.div(gradient, self._world_size, out=view)
        else:
            if grads:
                torch._foreach_copy_(views, grads)
            self._gradients.div_(self._world_size)
        self.send_unchanged()

    def send_unchanged(self) -> None:
        """Send the flat tensor with its present contents; call it directly only to send `extra`."""
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
            New gradients for the parameters that have one only on other ranks, by position.
        """
        (grads, views), self._sent = self._sent, ([], [])
        if grads:
            torch._foreach_copy_(grads, views)
        used = read(self._used) if self._missing else []
        return {i: self._views[i].to(self.parameters[i].dtype, copy=True) for i in self._missing if used[i] > 0}


def group_tensors(
    tensors: Sequence[Tensor], full_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> Iterator[list[Tensor]]:
    """Yield `tensors`, in order, in groups of one device and dtype, as DDP makes its buckets.

    The tensor with which a group reaches its size is the group's last one, because a larger message costs less than an
    additional one.

    Args:
        tensors: Tensors on any devices, of any dtypes.
        full_bytes: Size at which a group is complete.
        first_bytes: Size at which the first group of each kind is complete, if that is less.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    missing: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        groups.setdefault(kind, []).append(tensor)
        missing[kind] = missing.get(kind, min(first_bytes, full_bytes)) - tensor.nbytes
        if missing[kind] <= 0:
            yield groups.pop(kind)
            missing[kind] = full_bytes
    yield from groups.values()


@dataclass(frozen=True)
class Plan:
    """The buckets for one set of trained parameters."""

    buckets: list[Bucket]
    checksum: int
    """Equal on ranks that train the same parameters."""
    header: Tensor
    """The numbers in the first bucket with which `RankCheck` compares the ranks."""


class AveragedParameters:
    """The tensors whose gradients are averaged, as they were at the last `refresh`, and their buckets.

    Parameters of an optimizer are always averaged; without any optimizer, all parameters are. Others are candidates:
    parameters of modules and bare tensors that the trainer may update by hand, include in a norm or copy. They are
    averaged from their first gradient on.

    Args:
        discovered: The trainer's objects. Sharded parameters, and the parameters of ``DistributedDataParallel``
            modules in the class, are skipped, since torch averages their gradients.
        rank_local: Objects that differ by rank on purpose.
        group: Process group; None means all ranks.
        bucket_bytes: Size at which a bucket is complete.
        wire: Type in which gradients are sent; None keeps their type.

    Attributes:
        all: Tensors that are averaged, and candidates; the same list object while they do not change.
        by_hand: Ids of the tensors that no optimizer holds.
    """

    def __init__(
        self,
        discovered: Discovered,
        rank_local: RankLocal,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        wire: torch.dtype | None = None,
    ) -> None:
        self._discovered = discovered
        self._rank_local = rank_local
        modules = [m for found in discovered.modules for m in found.value.modules()]
        replicated = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._foreign = {id(p) for m in replicated for p in m.parameters()}
        self._in_groups: list[Tensor] | None = None
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self._bare: list[Found[Tensor]] = []
        self._included: set[int] = set()
        self.all: list[Tensor] = []
        self.by_hand: frozenset[int] = frozenset()
        self._candidates: dict[int, Tensor] = {}
        """Tensors that are averaged from their first gradient on, by id."""
        self._group, self._bucket_bytes, self._wire = group, bucket_bytes, wire
        self._header_size = NUMBERS * dist.get_world_size(group)
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self.refresh()
        self._bucket_group = self._new_group()  # made here, because all ranks must make it together

    def refresh(self) -> bool:
        """Find parameters that were added, or that replaced others of the same name; return whether any were found."""
        in_groups = [p for found in self._discovered.optimizers for p in parameters_of(found.value)]
        before = self._in_groups
        if (
            before is not None
            and len(before) == len(in_groups)
            and all(map(operator.is_, before, in_groups))
            and all(slots.get(name) is parameter for slots, name, parameter in self._slots)
            and all(now.value is each.value for now, each in zip(self._bare_now(), self._bare, strict=True))
        ):
            return False
        self._plans.clear()
        self._in_groups = in_groups
        skipped = self._foreign | self._rank_local.ids(self._discovered)
        held = {id(p) for p in in_groups}
        everything = (*in_groups, *(p for _, p in self.named()))
        unique = {id(p): p for p in everything if id(p) not in skipped and not isinstance(p, DTensor)}
        self.all = list(unique.values())
        self.by_hand = frozenset(unique.keys() - held)
        self._included &= self.by_hand
        candidates = self.by_hand - self._included if self._discovered.optimizers else frozenset()
        self._candidates = {key: p for key, p in unique.items() if key in candidates}
        self._slots = [
            (m._parameters, name, p)
            for found in self._discovered.modules
            for m in found.value.modules()
            for name, p in m._parameters.items()
            if p is not None and id(p) in self.by_hand
        ]
        bare = self._discovered.current(self._discovered.tensors)
        self._bare = [each for each in bare if id(each.value) in self.by_hand]
        return True

    def include_new(self) -> None:
        """Average candidates that have their first gradient from now on."""
        new = [key for key, p in self._candidates.items() if read_gradient(p) is not None]
        for key in new:
            del self._candidates[key]
        if new:
            self._included.update(new)
            self._plans.clear()

    def trained(self) -> list[Tensor]:
        """Return the tensors that are averaged now: all that require a gradient, except for candidates."""
        return [p for p in self.all if p.requires_grad and id(p) not in self._candidates]

    def plan(self) -> Plan:
        """Return the plan for the parameters that require gradients now; a GAN may alternate between two sets."""
        pattern = tuple([p.requires_grad for p in self.all])
        plan = self._plans.get(pattern)
        if plan is None:
            plan = self._plans[pattern] = self.make_plan()
        return plan

    def make_plan(self, *, most_buckets: int | None = None) -> Plan:
        """Return a new plan, of at most `most_buckets` buckets."""
        trained, numbers = self.trained(), {id(p): i for i, p in enumerate(self.all)}
        checksum = crc32(str([(numbers[id(p)], p.shape, p.dtype) for p in trained]).encode()) % CHECKSUMS
        # Backward computes the gradients of the last parameters first, so their bucket is the first.
        groups = list(group_tensors(trained[::-1], self._bucket_bytes))[:most_buckets]
        # The first bucket has the header; the last of several has a flag for changed gradients.
        extras = [self._header_size] + [0] * (len(groups) - 2) + [1] * (len(groups) > 1)
        group = self._bucket_group or self._group
        buckets = [Bucket(each, group, extra, self._wire) for each, extra in zip(groups, extras, strict=False)]
        return Plan(buckets, checksum, buckets[0].extra if buckets else torch.empty(0))

    def _new_group(self) -> dist.ProcessGroup | None:
        """Return a separate process group of the same ranks for the buckets, if there are several buckets.

        Buckets are sent during backward, and on each rank before or after other collectives of the trainer (of a
        synchronized BatchNorm, for example). In a separate group this order does not matter.
        """
        if len(list(group_tensors(self.all, self._bucket_bytes))) < 2:
            return None
        parent = self._group or dist.group.WORLD
        assert parent is not None
        group: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(parent), timeout=group_timeout(parent))
        return group

    def release_group(self) -> None:
        """Release the process group of the buckets, and the buckets. Collective.

        Only a gloo group has to be destroyed, since it keeps threads.
        """
        self._plans.clear()
        group, self._bucket_group = self._bucket_group, None
        if group is not None and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)

    def _bare_now(self) -> list[Found[Tensor]]:
        return self._discovered.current(self._bare) if self._bare else []

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters of modules and bare tensors with their paths, without tensors that only an optimizer has."""
        for found in self._discovered.modules:
            yield from self._rank_local.parameters(found)
        yield from self._rank_local.bare(self._discovered)


def wire_type(strategy: Any) -> torch.dtype | None:
    """Return the type in which `strategy` sends gradients; None if it keeps their type.

    Raises:
        ValueError: Its communication hook does more than change the type; the message has the way out.
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
