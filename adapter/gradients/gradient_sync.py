"""Keeps the replicas of a data-parallel run equal: gradients averaged, buffers and first weights from rank 0.

A trainer calls its modules directly, so ``DistributedDataParallel`` and its forward never see them. What it does is
done here for bare tensors instead, with the same arithmetic, and without its conditions: a parameter may be unused on
one rank, be used twice by a checkpointed segment, or get gradients from several backward calls.

Averaging is exact under accumulation, because it averages the whole of ``p.grad``: the part that was averaged before
is equal on all ranks and stays what it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered

__all__ = ["BufferSync", "GradientSync", "average", "average_scalar", "broadcast_from_zero", "check_same_on_all_ranks"]

BUCKET_BYTES = 25 * 2**20
"""Gradients are averaged in pieces of this size, each on its way while the next is packed (DDP's own default)."""

LATE_CALLS = 8
"""How many calls a GPU may be behind the host before the host waits for it."""


class GradientSync:
    """Averages the gradients of all managed optimizers over the ranks; called by all ranks after each backward.

    A trainer without optimizers updates by hand: then it is the gradients of all that wants one.

    Args:
        discovered: The trainer's objects. Parameters of its own ``DistributedDataParallel`` modules and sharded ones
            are left to those.
        group: Process group; None means all ranks.
    """

    def __init__(self, discovered: Discovered, group: dist.ProcessGroup | None = None) -> None:
        self._discovered = discovered
        self.group = group
        self._world_size = dist.get_world_size(group)
        self._foreign = {id(p) for m in _replicated_by_themselves(discovered) for p in m.parameters()}
        self._sent: deque[_SentOrdinal] = deque()
        self._sizes: list[int] | None = None
        self._candidates: list[Tensor] = []
        self._plans: dict[tuple[bool, ...], list[_Bucket]] = {}

    @torch.no_grad()
    def __call__(self, ordinal: int = 0) -> None:
        """Replace every ``p.grad`` by its mean over the ranks, where any rank has one.

        Args:
            ordinal: How many times this was done for the same update already; must be the same on all ranks.

        Raises:
            ContractError: It was not: some ranks looked at gradients between their backward calls, others did not, and
                what was averaged does not belong together.
        """
        buckets = self._buckets()
        for bucket in buckets:
            bucket.send(ordinal)
        for bucket in buckets:
            bucket.land()
        if buckets:
            self._sent.append(_SentOrdinal(ordinal, *_to_host(buckets[0].ordinal)))
            self._check_ordinals()

    def _check_ordinals(self) -> None:
        """Compare ordinals with their means; on a GPU some calls later, so that the host need not wait for the device.

        All ranks look at one after the same number of calls, so that all that have an error raise it in the same call.
        """
        latest = self._sent[-1]
        while len(self._sent) > (0 if latest.ready is None else LATE_CALLS):
            sent = self._sent.popleft()
            if sent.ready is not None and not sent.ready.query():  # type: ignore[no-untyped-call]
                sent.ready.synchronize()
            if abs(float(sent.mean) - sent.ordinal) > 0.5 / self._world_size + 0.02 * sent.ordinal:
                raise ContractError(
                    "Ranks averaged their gradients at different points of a step. `train_step` reads gradients "
                    "between its backward calls, or calls backward, on some ranks only; it must do so on all."
                )

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are averaged, as they are now."""
        self._refresh()
        return [p for p in self._candidates if p.requires_grad]

    def _refresh(self) -> None:
        """Follow optimizers that were given more parameters."""
        sizes = [len(group["params"]) for found in self._discovered.optimizers for group in found.value.param_groups]
        if sizes != self._sizes:
            self._sizes = sizes
            self._plans.clear()
            self._candidates = [
                p for p in self._discovered.updated() if id(p) not in self._foreign and not isinstance(p, DTensor)
            ]

    def _buckets(self) -> list[_Bucket]:
        self._refresh()
        # A GAN switches requires_grad between its phases, on all ranks alike: each pattern has its own plan.
        pattern = tuple([p.requires_grad for p in self._candidates])
        plan = self._plans.get(pattern)
        if plan is None:
            # Backward makes the last parameters' gradients first; so does the order of the buckets.
            wanted = [p for p in reversed(self._candidates) if p.requires_grad]
            plan = [_Bucket(parameters, self._world_size, self.group) for parameters in _buckets(wanted)]
            self._plans[pattern] = plan
        return plan


class _SentOrdinal(NamedTuple):
    """An ordinal on its way through the device: what this rank sent, the mean, and when that can be read."""

    ordinal: int
    mean: Tensor
    ready: torch.cuda.Event | None


class _Bucket:
    """Parameters whose gradients travel together, and the flat tensor that they travel in.

    The tensor is kept, as DDP keeps its own: memory that was never touched is several times slower to write.
    """

    def __init__(self, parameters: list[Tensor], world_size: int, group: dist.ProcessGroup | None) -> None:
        self._parameters = parameters
        self._world_size = world_size
        self._group = group
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        # The tail says which parameters have a gradient, so that one that no rank used keeps none, as with one process.
        self._flat = torch.empty(size + len(parameters) + 1, dtype=first.dtype, device=first.device)
        sizes = [*(p.numel() for p in parameters), len(parameters), 1]
        *pieces, self._used, self.ordinal = torch.split(self._flat, sizes)
        self._views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
        self._packed: tuple[list[Tensor], list[Tensor]] = ([], [])
        """The gradients that are dense, and where each stands in the flat tensor."""
        self._missing: list[int] = []
        self._sparse: list[int] = []
        self._work: Any = None

    def send(self, ordinal: int) -> None:
        """Pack the gradients and start to average them, and `ordinal` with them."""
        grads = [p.grad for p in self._parameters]
        self._missing = [i for i, grad in enumerate(grads) if grad is None]
        self._sparse = [i for i, grad in enumerate(grads) if grad is not None and grad.layout is not torch.strided]
        self._used.fill_(1)
        self.ordinal.fill_(ordinal)
        if self._missing or self._sparse:
            self._pack_others(grads)
        else:
            self._packed = cast("list[Tensor]", grads), self._views
        if self._packed[0]:
            torch._foreach_copy_(self._packed[1], self._packed[0])
        self._flat.div_(self._world_size)
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def _pack_others(self, grads: list[Tensor | None]) -> None:
        for i in self._missing:
            self._used[i] = 0
            self._views[i].zero_()
        for i in self._sparse:
            self._views[i].copy_(cast("Tensor", grads[i]).to_dense())
        others = {*self._missing, *self._sparse}
        dense = [(g, view) for i, (g, view) in enumerate(zip(grads, self._views, strict=True)) if i not in others]
        self._packed = [cast("Tensor", g) for g, _ in dense], [view for _, view in dense]

    def land(self) -> None:
        """Wait for the averages and hand them out."""
        self._work.wait()
        (grads, views), self._packed = self._packed, ([], [])
        if grads:
            torch._foreach_copy_(grads, views)
        for i in self._sparse:
            parameter = self._parameters[i]
            parameter.grad = self._views[i].to_sparse(cast("Tensor", parameter.grad).sparse_dim())
        if self._missing:
            used_somewhere = self._used.tolist()
            for i in self._missing:
                if used_somewhere[i] > 0:
                    self._parameters[i].grad = self._views[i].clone()


class BufferSync:
    """Gives every rank the buffers of rank 0, such as the running statistics of a BatchNorm.

    As with DDP each rank's forward updates its own, and rank 0's count. Called at the end of a step, so that
    checkpoints, samples and comparisons between steps see equal replicas.

    Args:
        discovered: All buffers of trained modules are kept equal; of others (EMA copies), those of norm layers.
        group: Process group; None means all ranks.
    """

    def __init__(self, discovered: Discovered, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        owners = [m for found in discovered.trained for m in found.value.modules()]
        owners += [m for found in discovered.untrained for m in found.value.modules() if isinstance(m, _NormBase)]
        self._slots = [(owner, name) for owner in owners for name, b in owner._buffers.items() if b is not None]

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __call__(self) -> None:
        """Overwrite the buffers with those of rank 0."""
        buffers = (owner._buffers.get(name) for owner, name in self._slots)
        broadcast_from_zero([b for b in buffers if b is not None], self._group)


@torch.no_grad()
def broadcast_from_zero(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` with those of the group's first rank; sharded tensors are left alone."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    for bucket in _buckets([t for t in tensors if not isinstance(t, DTensor)]):
        flat = torch.cat([t.detach().reshape(-1) for t in bucket])
        dist.broadcast(flat, src=source, group=group)
        for tensor, view in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.detach().copy_(view.view(tensor.shape))


@torch.no_grad()
def average(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` with their mean over the ranks; to be called by all of them, with tensors of equal shapes."""
    world_size = dist.get_world_size(group)
    for bucket in _buckets(list(tensors)):
        flat = torch.cat([t.reshape(-1) for t in bucket]).div_(world_size)
        dist.all_reduce(flat, group=group)
        for tensor, view in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(view.view(tensor.shape))


def average_scalar(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """The mean of a loss over the ranks, of the type it came in; None and other things come back as they are."""
    if not isinstance(value, Tensor | float | int):
        return value
    mean = torch.as_tensor(value, dtype=torch.float64, device=device).detach().clone()
    dist.all_reduce(mean.div_(dist.get_world_size(group)), group=group)
    return mean.to(value.dtype) if isinstance(value, Tensor) else mean.item()


def check_same_on_all_ranks(discovered: Discovered, group: dist.ProcessGroup | None = None) -> None:
    """Refuse ranks whose trainers built different things.

    Raises:
        ContractError: Names the first entry that differs and the two ranks.
    """
    mine = _inventory(discovered)
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            here, there = next(
                (a, b) for a, b in zip([*everyone[0], "nothing"], [*other, "nothing"], strict=False) if a != b
            )
            raise ContractError(
                f"Ranks 0 and {rank} built different things: rank 0 has {here}, rank {rank} has {there}. "
                "`configure` must build the same modules and optimizers, in the same order, on every rank."
            )


def _inventory(discovered: Discovered) -> list[str]:
    lines = [
        f"{m.path}.{name} {tuple(t.shape)} {t.dtype}"
        for m in discovered.modules
        for name, t in (*m.value.named_parameters(), *m.value.named_buffers())
    ]
    lines += [f"{p.path} {tuple(p.value.shape)} {p.value.dtype}" for p in discovered.parameters]
    if not discovered.optimizers:
        lines += [
            f"{t.path} {tuple(t.value.shape)} {t.value.dtype}" for t in discovered.tensors if t.value.requires_grad
        ]
    for found in discovered.optimizers:
        shapes = [[tuple(p.shape) for p in group["params"]] for group in found.value.param_groups]
        lines.append(f"{found.path} {type(found.value).__name__} over {shapes}")
    return lines


def _replicated_by_themselves(discovered: Discovered) -> Iterator[nn.Module]:
    for found in discovered.modules:
        yield from (m for m in found.value.modules() if isinstance(m, DistributedDataParallel))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` in their order, in groups of one kind and of at most `BUCKET_BYTES`."""
    open_buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        if kind in open_buckets and sizes[kind] + size > BUCKET_BYTES:
            yield open_buckets.pop(kind)
        sizes[kind] = sizes[kind] + size if kind in open_buckets else size
        open_buckets.setdefault(kind, []).append(tensor)
    yield from open_buckets.values()


def _to_host(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what to wait for before it is read."""
    if value.device.type != "cuda":
        return value, None
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return host, ready
