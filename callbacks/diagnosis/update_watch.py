"""Looks at gradients and weights right before an update, and at the weights right after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..optimizer_state import with_step_hooks
from .contained import contained

__all__ = ["UpdateWatch"]

MOST_COMPARED = 64
"""How many weights of an optimizer are compared before and after an update, evenly spread."""
SAMPLES_OF_TENSOR = 1024
"""Elements of each of them that are: a copy of all would double their memory."""
_HALVES = frozenset({torch.float16, torch.bfloat16})
NOT_SEEN = -1.0


class UpdateWatch:
    """Reads what optimizers are about to use, in hooks that torch's own optimizers call in their ``step``.

    So gradients are those that are used: averaged over ranks, unscaled, clipped. An update that a gradient scaler
    leaves out is not seen. Nothing here waits for a device.

    Args:
        optimizers: Those of the run; others than torch's are left out.
        named_parameters: The parameters that may be in them.
        failures: Takes what goes wrong within a step.
    """

    def __init__(
        self,
        optimizers: Iterable[Any],
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        failures: list[Exception],
    ) -> None:
        self.failures = failures
        self.optimizers = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
        held = {id(p) for optimizer in self.optimizers for p in _parameters(optimizer)}
        named = {id(p): name for name, p in named_parameters if p.requires_grad and id(p) in held}
        self.names = list(named.values())
        self._index = {key: index for index, key in enumerate(named)}
        self._handles: list[RemovableHandle] = []
        self._norms: list[tuple[list[int], torch.Tensor]] = []
        self._is_seen = False
        self._before: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._updated: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self.highest_rate: float | None = None
        """Of the last updates that were watched."""

    def attach(self) -> None:
        """Watch updates from now on, and forget those that were watched before."""
        self._norms.clear()
        self._updated.clear()
        self._weights.clear()
        self._before.clear()
        self._is_seen, self.highest_rate = False, None
        if not self._handles:
            for optimizer in with_step_hooks(self.optimizers):
                self._handles.append(optimizer.register_step_pre_hook(self._before_update))
                self._handles.append(optimizer.register_step_post_hook(self._after_update))

    def detach(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()

    def summary(self, device: torch.device) -> torch.Tensor:
        """What was seen, on `device`, so that the largest of all ranks' is that of all.

        For each of `names` the gradient's norm (-1 without any update, ``inf`` where not finite), then the ratio of
        update and weights (-1 where unknown), whether weights were not finite, and the highest learning rate (-1).
        """
        norms = torch.full((len(self.names),), 0.0 if self._is_seen else NOT_SEEN, dtype=torch.float64, device=device)
        for indices, values in self._norms:
            finite = torch.nan_to_num(values.to(device, torch.float64), nan=float("inf"))
            norms[torch.tensor(indices, device=device)] = finite
        rest = torch.full((3,), NOT_SEEN, dtype=torch.float64, device=device)
        if self._updated and self._weights:
            updated = _norm_of(self._updated, device)
            weights = _norm_of(self._weights, device)
            rest[0] = torch.where(
                torch.isfinite(updated) & torch.isfinite(weights) & (weights > 0), updated / weights, NOT_SEEN
            )
            rest[1] = (~torch.isfinite(weights)).double()
        if self.highest_rate is not None:
            rest[2] = self.highest_rate
        return torch.cat([norms, rest])

    @contained
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_seen = True
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.highest_rate = max([*rates, *([] if self.highest_rate is None else [self.highest_rate])], default=None)
        held = [p for p in _parameters(optimizer) if id(p) in self._index and p.grad is not None]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for parameter in held:
            gradient = _local(parameter.grad)
            groups[gradient.device, gradient.dtype].append((self._index[id(parameter)], gradient))
        for (_, dtype), members in groups.items():
            norms = _norms([gradient for _, gradient in members], dtype)
            self._norms.append(([index for index, _ in members], norms))
        samples = [_sample(parameter) for parameter in held[:: -(-len(held) // MOST_COMPARED) or 1]]
        copies = [sample.clone() for sample in samples]
        self._before[id(optimizer)] = (samples, copies)

    @contained
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        samples, copies = self._before.pop(id(optimizer), ([], []))
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for sample, copy in zip(samples, copies, strict=True):
            if sample.numel():
                groups[sample.device, sample.dtype].append((sample, copy))
        for (_, dtype), members in groups.items():
            before = [copy for _, copy in members]
            change = torch._foreach_sub([sample for sample, _ in members], before)
            self._updated.append(_norms(list(change), dtype))
            self._weights.append(_norms(before, dtype))


def _parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a gradient, dense."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    dense: torch.Tensor = local.coalesce().values() if local.is_sparse else local
    return dense


def _sample(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A view of some elements of a weight, evenly spread; empty where it cannot be viewed as one row."""
    local = _local(parameter)
    if not local.is_floating_point() or not local.is_contiguous():
        return local.new_empty(0)
    return local.view(-1)[:: max(1, local.numel() // SAMPLES_OF_TENSOR)]


def _norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The L2 norm of each; of halves in fp32, where a norm of fp16 would overflow."""
    if dtype in _HALVES:
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return torch.stack(list(torch._foreach_norm(list(tensors))))


def _norm_of(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of tensors whose norms are given."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([each.to(device, torch.float64) for each in norms]))
    return norm
