"""Leaves out updates that are not finite: the policy ``skip`` of `WatchNonfinite`.

A loss that is nan or infinite makes all gradients of its backward call nan. They are averaged over the ranks and
accumulated like others, so that every rank sees them, and the update that they belong to is left out on all of them,
also where it comes some steps later, or after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from ...callbacks.finite import are_finite
from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered

__all__ = ["UpdateGuard"]


class UpdateGuard:
    """Looks at gradients before each update, and puts back the buffers of a step whose loss or update was not finite.

    A look waits for the device. The copy of the buffers costs their memory once, and is renewed in every step.

    Args:
        discovered: What the trainer built.
        tell: Called for each update, with ``left_out``.
        group: Process group of the ranks.
        shared: Ids of the optimizers that all ranks step alike; empty on a single rank.
        rank_local: Ids of the parameters whose gradients are each rank's own.

    Raises:
        ContractError: The trainer has no optimizer whose updates could be left out, or LBFGS.
    """

    def __init__(
        self,
        discovered: Discovered,
        tell: Callable[..., None],
        *,
        group: dist.ProcessGroup | None = None,
        shared: Collection[int] = (),
        rank_local: Collection[int] = (),
    ) -> None:
        _check_can_skip(discovered)
        self._tell = tell
        self._group = group
        self._shared = shared
        self._rank_local = rank_local
        self._modules = [found.value for found in discovered.modules]
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._losses: list[Tensor] = []
        self._has_left_out = False

    @torch.no_grad()
    def begin(self) -> None:
        """A step begins."""
        self._losses.clear()
        self._has_left_out = False
        buffers = {id(b): b for module in self._modules for b in module.buffers() if not isinstance(b, DTensor)}
        if [id(buffer) for buffer, _ in self._saved] != list(buffers):
            self._saved = [(buffer, torch.empty_like(buffer)) for buffer in buffers.values()]
        for buffer, copy in self._saved:
            copy.copy_(buffer)

    def root_gradients(self, outputs: Any, gradients: Any) -> Any:
        """The root gradients of a backward call, nan where their loss is not finite."""
        return tuple(map(self._root_gradient, outputs, gradients))

    @torch.no_grad()
    def _root_gradient(self, output: Any, gradient: Any) -> Any:
        if not isinstance(gradient, Tensor) or isinstance(gradient, DTensor) or output.numel() != 1:
            return gradient  # values inside of the graph may be infinite where the loss is not
        loss = output.detach()
        self._losses.append(loss)
        return torch.where(torch.isfinite(loss), gradient, torch.nan)

    def may_update(self, optimizer: Optimizer) -> bool:
        """Whether all gradients of `optimizer` are finite, on all ranks; if not, its update is counted as left out."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_finite = are_finite([_dense(p.grad) for p in parameters if p.grad is not None])
        if id(optimizer) in self._shared and any(map(self._is_of_this_rank, parameters)):
            verdict = torch.tensor(float(is_finite), device=parameters[0].device)
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self._group)
            is_finite = bool(verdict)
        self._has_left_out = self._has_left_out or not is_finite
        self._tell(left_out=not is_finite)
        return is_finite

    def _is_of_this_rank(self, parameter: Tensor) -> bool:
        """Whether other ranks do not see what this one sees of a gradient, which is averaged otherwise."""
        return isinstance(parameter, DTensor) or id(parameter) in self._rank_local

    @torch.no_grad()
    def end(self, *, scales: bool) -> None:
        """A step ends: its running statistics are those from before it, where it was not finite.

        Args:
            scales: Whether a gradient scaler has left its updates out, of which it has not told; only a loss tells
                those from the overflows that make a scaler lower its scale.
        """
        is_finite = are_finite(self._losses)
        if scales:
            self._tell(left_out=not is_finite)
        if self._has_left_out or not is_finite:
            for buffer, copy in self._saved:
                buffer.copy_(copy)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def _check_can_skip(discovered: Discovered) -> None:
    instead = "Use `on_nonfinite: stop`, or leave such updates out in `train_step`."
    if not discovered.optimizers:
        raise ContractError(
            "`on_nonfinite: skip` needs an optimizer, in the state or on the trainer, whose updates can be left out; "
            f"this trainer has none. {instead}"
        )
    refused = [found.path for found in discovered.optimizers if isinstance(found.value, LBFGS)]
    if refused:
        raise ContractError(
            f"`on_nonfinite: skip` cannot leave out an update of {', '.join(refused)}: LBFGS evaluates the loss "
            f"several times within it. {instead}"
        )
