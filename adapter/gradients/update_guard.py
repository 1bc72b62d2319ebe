"""Leaves out updates that `Recover`, or the policy ``skip`` of `WatchNonfinite`, decides against.

A loss that is nan or infinite makes all gradients of its backward call nan. They are averaged over the ranks and
accumulated like others, so that every rank sees them, and the update that they belong to is left out on all of them,
also where it comes some steps later, or after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from ...callbacks.finite import are_finite
from ...callbacks.health.faults import as_maximum, from_maximum
from ...callbacks.health.recover import Recover
from ...callbacks.health.watch_nonfinite import WatchNonfinite
from ...callbacks.hook.events import callbacks_of
from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from .step_part import BackwardCall, StepPart

__all__ = ["UpdateGuard", "UpdateJudge", "update_guard"]


class UpdateJudge(Protocol):
    """Decides about updates: `Recover` or `WatchNonfinite`, of which the guard needs this and no more."""

    called_by: str
    """How an error names what asks for it."""
    judges_losses: bool
    """Whether a loss that is finite can be a fault."""
    judges_norms: bool
    """Whether gradients that are finite can be a fault."""
    rate_factor: float
    """By what the learning rate of each update is multiplied."""

    def may_update(self, loss: float | None, gradient_norm: float | None) -> bool:
        """Whether an update is made; asked with the same figures on all ranks.

        Args:
            loss: The largest loss of the backward calls of this step so far; None where nobody judges losses.
            gradient_norm: L2 norm of all gradients; None where nobody judges norms and all are finite. Of both
                ``nan`` says that one is not finite.
        """
        ...

    def note_loss(self, loss: float | None, *, is_scaled: bool) -> None:
        """A step has ended, of which this is the largest loss on this rank; ``nan`` where one is not finite.

        `is_scaled` says that a gradient scaler leaves out updates, about which nobody was asked.
        """


class UpdateGuard(StepPart):
    """Looks at gradients before each update, and puts back the buffers of a step whose loss or update was not finite.

    A look waits for the device. The copy of the buffers costs their memory once, and is renewed in every step.

    Args:
        discovered: What the trainer built.
        judge: Decides about updates.
        group: Process group of the ranks.
        shared: Ids of the optimizers that all ranks step alike; empty on a single rank.
        rank_local: Ids of the parameters whose gradients are each rank's own.
        scales: Whether a gradient scaler leaves out updates, of which it does not tell; only a loss tells those from
            the overflows that make a scaler lower its scale.

    Raises:
        ContractError: The trainer has no optimizer whose updates could be left out, or LBFGS.
    """

    def __init__(
        self,
        discovered: Discovered,
        judge: UpdateJudge,
        *,
        group: dist.ProcessGroup | None = None,
        shared: Collection[int] = (),
        rank_local: Collection[int] = (),
        scales: bool = False,
    ) -> None:
        self._scales = scales
        self.may_skip = judge.called_by
        _check_can_skip(discovered, f"`{self.may_skip}`")
        self._judge = judge
        self._group = group
        self._shared = shared
        self._rank_local = rank_local
        self._modules = [found.value for found in discovered.modules]
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._losses: list[Tensor] = []
        self._has_left_out = False
        self._rates: list[tuple[dict[str, Any], Any]] = []
        """The rates of the update that is being made, where the judge has changed them."""

    @override
    @torch.no_grad()
    def begin(self, step: int) -> None:
        self._losses.clear()
        self._has_left_out = False
        buffers = {id(b): b for module in self._modules for b in module.buffers() if not isinstance(b, DTensor)}
        if [id(buffer) for buffer, _ in self._saved] != list(buffers):
            self._saved = [(buffer, torch.empty_like(buffer)) for buffer in buffers.values()]
        for buffer, copy in self._saved:
            copy.copy_(buffer)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        """Make the root gradients nan where their loss is not finite."""
        call.gradients = tuple(map(self._root_gradient, call.outputs, call.gradients))

    @torch.no_grad()
    def _root_gradient(self, output: Any, gradient: Any) -> Any:
        if not isinstance(gradient, Tensor) or isinstance(gradient, DTensor) or output.numel() != 1:
            return gradient  # values inside of the graph may be infinite where the loss is not
        loss = output.detach()
        self._losses.append(loss)
        return torch.where(torch.isfinite(loss), gradient, torch.nan)

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        if not self._scales and not self._is_to_be_made(optimizer):
            return False
        factor = self._judge.rate_factor
        if factor != 1.0:  # of which schedules see nothing
            self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
            for group, rate in self._rates:
                group["lr"] = rate * factor
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def _is_to_be_made(self, optimizer: Optimizer) -> bool:
        """Whether the update of `optimizer` is made, on all ranks alike."""
        parameters = list(parameters_of(optimizer))
        gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
        is_finite = are_finite(gradients)
        norm = _norm(gradients) if is_finite and self._judge.judges_norms else None
        loss = self._loss() if self._judge.judges_losses else None
        figures = [as_maximum(norm if is_finite else math.nan), as_maximum(loss)]
        is_shared = id(optimizer) in self._shared
        if is_shared and (self._judge.judges_losses or any(map(self._is_of_this_rank, parameters))):
            figures = self._largest(figures, parameters[0])
        may_update = self._judge.may_update(from_maximum(figures[1]), from_maximum(figures[0]))
        self._has_left_out = self._has_left_out or not may_update
        return may_update

    def _loss(self) -> float | None:
        """The largest loss of the backward calls of this step; ``nan`` where one is not finite."""
        if not self._losses:
            return None
        losses = torch.stack([loss.reshape(()).float() for loss in self._losses])
        largest, are_sound = torch.stack([losses.max(), losses.isfinite().all()]).tolist()
        return float(largest) if are_sound else math.nan

    def _largest(self, values: list[float], like: Tensor) -> list[float]:
        """The largest of all ranks, one by one."""
        tensor = torch.tensor(values, dtype=torch.float64, device=like.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def _is_of_this_rank(self, parameter: Tensor) -> bool:
        """Whether other ranks do not see what this one sees of a gradient, which is averaged otherwise."""
        return isinstance(parameter, DTensor) or id(parameter) in self._rank_local

    @override
    @torch.no_grad()
    def end(self) -> None:
        """A step ends: its running statistics are those from before it, where it was not finite."""
        loss = self._loss()
        self._judge.note_loss(loss, is_scaled=self._scales)
        if self._has_left_out or (loss is not None and math.isnan(loss)):
            for buffer, copy in self._saved:
                buffer.copy_(copy)


def update_guard(
    trainer: pl.Trainer,
    discovered: Discovered,
    *,
    group: dist.ProcessGroup | None,
    shared: Collection[int],
    rank_local: Collection[int],
    scales: bool,
) -> UpdateGuard | None:
    """The guard that `Recover` or `WatchNonfinite` of `trainer` asks for, if any; arguments are those of `UpdateGuard`.

    Raises:
        ContractError: As `UpdateGuard` does; or ranks would not make all updates alike, as `Recover` needs it.
    """
    callbacks = callbacks_of(trainer)
    judge: Recover | WatchNonfinite | None = next((c for c in callbacks if isinstance(c, Recover)), None)
    if judge is None:
        judge = next((c for c in callbacks if isinstance(c, WatchNonfinite) and c.policy == "skip"), None)
    if judge is None:
        return None
    own = [found.path for found in discovered.optimizers if id(found.value) not in shared]
    if isinstance(judge, Recover) and trainer.world_size > 1 and own:  # whose faults would be told by one rank alone
        raise ContractError(
            f"`Recover` needs updates that all ranks make alike, and those of {', '.join(own)} are each rank's own "
            "(`rank_local`). Use `on_nonfinite: skip`, or one device."
        )
    return UpdateGuard(discovered, judge, group=group, shared=shared, rank_local=rank_local, scales=scales)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def _norm(gradients: list[Tensor]) -> float:
    """L2 norm of all gradients; of sharded ones that of this rank's part."""
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return float(torch.nn.utils.get_total_norm(local)) if local else 0.0


def _check_can_skip(discovered: Discovered, what: str) -> None:
    instead = "Use `on_nonfinite: stop`, or leave such updates out in `train_step`."
    if not discovered.optimizers:
        raise ContractError(
            f"{what} needs an optimizer, in the state or on the trainer, whose updates can be left out; "
            f"this trainer has none. {instead}"
        )
    refused = [found.path for found in discovered.optimizers if isinstance(found.value, LBFGS)]
    if refused:
        raise ContractError(
            f"{what} cannot leave out an update of {', '.join(refused)}: LBFGS evaluates the loss "
            f"several times within it. {instead}"
        )
