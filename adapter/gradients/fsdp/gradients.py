"""Gradients of sharded parameters that only some ranks used, or that are not left by backward; ranks that part ways.

FSDP reduces what this rank computed. Where another rank used another head, or other experts, they would reduce
different things into each other. So every rank reduces zeros for what it did not use, and the ranks tell each other
what was used: what none of them did gets no gradient, as in one process. In the same message they compare which modules
they gathered.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....callbacks.checkpoint.sharded.boxes import sharded_like
from ...contract.exceptions import ContractError
from . import hooks as shard_hooks
from .units import ShardUnit

__all__ = ["ShardGradients"]

Differentiate = Callable[[tuple[Tensor, ...]], Sequence[Any]]

_SHOWN = 3
"""The last modules that are named of each rank where the ranks part ways."""


class ShardGradients:
    """Goes around each backward call of a trainer with sharded modules.

    Args:
        units: All units, in an order that is equal on all ranks.
        group: The ranks that share the shards.
        device: Where messages to the other ranks are.
    """

    def __init__(self, units: Sequence[ShardUnit], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._units = units
        self._group = group
        self._device = device
        self._parameters = [parameter for unit in units for parameter in unit.parameters]
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._by_shard = {id(parameter.sharded_param): i for i, parameter in enumerate(self._parameters)}
        self._used = [False] * len(self._parameters)
        self._had: list[bool] = []
        for group_of_unit in itertools.chain.from_iterable(unit.groups for unit in units):
            _before(group_of_unit, "post_backward", self._note)

    def has(self, tensor: Any) -> bool:
        """Whether `tensor` is a parameter whose gradients FSDP reduces."""
        return id(tensor) in self._by_shard

    def with_gathered(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What ``backward(inputs=…)`` is to differentiate by: the gathered parameters, too, where they are sharded."""
        return (*inputs, *self._gathered(inputs).values())

    def _gathered(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """By place in `tensors`, what modules compute with in place of the sharded ones among them."""
        records = {i: self._parameters[self._by_shard[id(t)]] for i, t in enumerate(tensors) if self.has(t)}
        return {i: record._unsharded_param for i, record in records.items() if hasattr(record, "_unsharded_param")}

    def touch(self, shard: Any) -> None:
        """A gradient came to `shard` itself, from a penalty on weights say."""
        self._used[self._by_shard[id(shard)]] = True

    def begin(self) -> None:
        """A backward call begins."""
        self._used = [False] * len(self._parameters)
        self._had = [parameter.sharded_param.grad is not None for parameter in self._parameters]
        self._reduce_unused(True)

    def end(self) -> None:
        """The backward call has ended: gradients are those of all ranks when this returns.

        Raises:
            ContractError: The ranks gathered different modules, so that what they computed is worthless.
        """
        flags = self._on_any_rank([*(unit.has_unreduced for unit in self._units), *self._used])
        left, self._used = flags[: len(self._units)], flags[len(self._units) :]
        if any(left):
            self._reduce_left({id(u.root): u.root for u, is_left in zip(self._units, left, strict=True) if is_left})
        for parameter, is_used, had in zip(self._parameters, self._used, self._had, strict=True):
            if not is_used and not had:
                parameter.sharded_param.grad = None
        self._reduce_unused(False)

    def _reduce_left(self, roots: dict[int, Any]) -> None:
        """Reduce gradients that FSDP did not notice, on every rank alike."""
        for root in roots.values():
            root._root_post_backward_final_callback()
        self._used = self._on_any_rank(self._used)

    def grad(self, differentiate: Differentiate, inputs: Sequence[Tensor], *, allow_unused: bool) -> tuple[Any, ...]:
        """What ``torch.autograd.grad`` gives for `inputs`; by sharded parameters, sharded like those and of all ranks.

        Modules compute with the gathered parameters, so that the sharded ones are in no graph but that of a penalty on
        the weights.

        Args:
            differentiate: Asks torch for gradients, None by what was not used.
            inputs: All of the trainer's, in its order.
            allow_unused: As torch's.

        Raises:
            ContractError: The ranks gathered different modules.
            RuntimeError: Torch's own, for what no rank used.
        """
        gathered = self._gathered(inputs)
        given = differentiate((*inputs, *gathered.values()))
        mine = dict(zip(gathered, given[len(inputs) :], strict=True))
        flags = [mine.get(i) is not None for i in range(len(inputs))]
        result: list[Any] = list(given[: len(inputs)])
        for i, is_used in enumerate(self._on_any_rank(flags)):
            if is_used:
                shard: Any = inputs[i]
                mean = torch.zeros(shard.shape, dtype=shard.dtype, device=shard.device)
                if mine.get(i) is not None:
                    mean.copy_(mine[i]).div_(dist.get_world_size(self._group))
                dist.all_reduce(mean, group=self._group)
                direct = result[i]
                result[i] = sharded_like(mean, shard)
                if direct is not None:
                    result[i] += direct.redistribute(placements=shard.placements)
        if not allow_unused and any(gradient is None for gradient in result):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        return tuple(result)

    def _on_any_rank(self, used: Sequence[bool]) -> list[bool]:
        """What any rank used, once all of them gathered the same modules since they were asked last."""
        log = [path for unit in self._units for path in unit.gathered]
        digest = zlib.crc32("\n".join(sorted(log)).encode()) & 0x7FFFFFFF
        message = torch.tensor([digest, -digest, *used], dtype=torch.int32, device=self._device)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
        most, least, *by_any = message.tolist()
        if most != -least:
            raise self._parted(log)
        for unit in self._units:
            unit.gathered.clear()
        return [bool(flag) for flag in by_any]

    def call_hooks(self) -> None:
        """Call what the trainer registered for after the accumulation of a gradient."""
        for parameter, is_used in zip(self._parameters, self._used, strict=True):
            for hook in shard_hooks.after_accumulation(parameter.sharded_param) if is_used else ():
                hook(parameter.sharded_param)

    def abandon(self) -> None:
        """The backward call failed."""
        self._reduce_unused(False)

    def _reduce_unused(self, enabled: bool) -> None:
        for unit in self._units:
            for group in unit.groups:
                group.reduce_scatter_unused_params = enabled

    def _note(self, group: Any) -> None:
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and (gathered.grad is not None or parameter.unsharded_accumulated_grad is not None):
                self._used[self._index[id(parameter)]] = True

    def _parted(self, log: list[str]) -> ContractError:
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(everyone, log, group=self._group)
        rank, other = next((rank, other) for rank, other in enumerate(everyone) if sorted(other) != sorted(everyone[0]))
        return ContractError(
            f"Ranks called different sharded modules: rank 0 {_text(everyone[0], other)}, rank {rank} "
            f"{_text(other, everyone[0])}. Put modules of which ranks choose into one nn.ModuleList or nn.ModuleDict, "
            "which is gathered as one, and leave them out of the shard policy; or use ddp."
        )


def _text(mine: list[str], other: list[str]) -> str:
    more = [path for path in dict.fromkeys(mine) if mine.count(path) > other.count(path)]
    return ", ".join(more[-_SHOWN:]) or "none beside what both called"


def _before(owner: Any, name: str, first: Any) -> None:
    """Have `first` called with `owner` before each call of its method `name`."""
    inner = getattr(owner, name)

    def call(*args: Any) -> Any:
        first(owner)
        return inner(*args)

    setattr(owner, name, call)
