"""Broadcasts from rank 0: weights when training begins, and buffers, such as the running statistics of a BatchNorm.

As with DDP, each rank's forward updates the buffers on that rank, and the buffers of rank 0 win. They are sent when a
step ends, so that code outside of a step finds them equal on all ranks. This includes modules without trained weights
(the center of DINO's loss, the running statistics of observations, copies with moving averages), since the comparison
of replicas includes them.

They are not sent earlier, with the last bucket of gradients, because some ranks may call a module after that exchange
(a target network or a moving average). They are not sent later, when the next forward begins, as in DDP, because code
between the steps (an evaluation, a checkpoint, a callback) reads them. A step may also read them without calling their
module (in a tensor that it keeps, by ``torch.func``, in a compiled graph), and genlight would not notice that.
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

from ...contract.exceptions import ContractError
from ...discovery.discover import Discovered
from ...discovery.rank_local import EVERYTHING_SHARED, RankLocal
from ...plumbing.devices import gather_objects
from ..lost_ranks import explain_broken_broadcast
from ..step_part import StepPart
from .buckets import BUCKET_BYTES

IN_FLIGHT_AT_MOST = 2
"""Messages of a broadcast that may be in memory at once, in addition to the tensors themselves."""


class BufferSync(StepPart):
    """Sends the buffers of rank 0 to all ranks at the end of each step.

    Args:
        discovered: The trainer's objects; all buffers of its modules are kept equal, also in untrained modules.
        group: Process group; None means all ranks.
        rank_local: Objects that differ by rank on purpose.
    """

    def __init__(
        self,
        discovered: Discovered,
        group: dist.ProcessGroup | None = None,
        rank_local: RankLocal = EVERYTHING_SHARED,
    ) -> None:
        self._group = group
        self._owners: dict[int, tuple[nn.Module, set[str]]] = {}
        """Modules with buffers, and the names of their rank-local buffers; a buffer may still be None."""
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
        """Send the buffers that rank 0 has now; the step may have replaced, resized or cast them.

        Raises:
            RankFailedError: Another rank is lost.
        """
        named = ((name in local, b) for owner, local in self._owners.values() for name, b in owner._buffers.items())
        buffers = {id(b): b for is_local, b in named if b is not None and not is_local}
        try:
            broadcast_from_zero(buffers.values(), self._group)
        except RuntimeError as error:
            raise explain_broken_broadcast(error, self._step, self._group) from error


@torch.no_grad()
def broadcast_from_zero(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `tensors` with the values of the group's first rank; skips sharded tensors."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    in_flight: deque[tuple[list[Tensor], Tensor, Any]] = deque()
    for message in _messages([t for t in tensors if t.numel() and not isinstance(t, DTensor)]):
        if len(in_flight) == IN_FLIGHT_AT_MOST:
            _receive(*in_flight.popleft())
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in message])
        in_flight.append((message, flat, dist.broadcast(flat, src=source, group=group, async_op=True)))
    while in_flight:
        _receive(*in_flight.popleft())


def _receive(tensors: list[Tensor], flat: Tensor, work: Any) -> None:
    work.wait()
    pieces = torch.split(flat, [t.nbytes for t in tensors])
    torch._foreach_copy_(tensors, [piece.view(t.dtype).view(t.shape) for piece, t in zip(pieces, tensors, strict=True)])


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of tensors on one device: at most `BUCKET_BYTES` per group, or a single larger tensor.

    Dtypes with larger elements come first, so that each tensor is aligned in the flat tensor.
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


def start_equal(
    discovered: Discovered, group: dist.ProcessGroup | None = None, rank_local: RankLocal = EVERYTHING_SHARED
) -> None:
    """Give every rank the weights and buffers of rank 0; refuse ranks whose trainers built different things.

    Raises:
        ContractError: Names the first entry that differs and the two ranks.
    """
    everyone: list[list[str]] = gather_objects(_inventory(discovered, rank_local), group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            here, there = next(
                (a, b) for a, b in zip([*everyone[0], "nothing"], [*other, "nothing"], strict=False) if a != b
            )
            raise ContractError(
                f"Ranks 0 and {rank} built different things: rank 0 has {here}, rank {rank} has {there}. `configure` "
                "must build the same modules and optimizers, in the same order, on every rank; name objects that are "
                "meant to differ in the trainer's `rank_local`."
            )
    broadcast_from_zero([tensor for _, tensor in rank_local.tensors(discovered)], group)


def _inventory(discovered: Discovered, rank_local: RankLocal) -> list[str]:
    """Return a line for each tensor and optimizer, to compare the ranks."""
    tensors = rank_local.tensors(discovered)
    frozen = {id(p) for found in discovered.modules for p in found.value.parameters() if not p.requires_grad}
    lines = [f"{path} {tuple(t.shape)} {t.dtype}{' frozen' if id(t) in frozen else ''}" for path, t in tensors]
    for found in rank_local.shared(discovered):
        shapes = [[tuple(p.shape) for p in group["params"]] for group in found.value.param_groups]
        lines.append(f"{found.path} {type(found.value).__name__} over {shapes}")
    return lines
