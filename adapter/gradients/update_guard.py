"""Skips updates that `Recover` rejects.

If a loss is nan or infinite, all gradients of its backward call become nan. They are averaged over the ranks and
accumulated like others. So every rank sees them, and all ranks skip the next update that uses them, even if it comes
some steps later or after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from ...callbacks.finite import are_finite
from ...callbacks.health.recover import Recover
from ...callbacks.hook.events import callbacks_of
from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from .step_part import BackwardCall, StepPart

SKIPPER = "`Recover` (`on_nonfinite: skip` of a job)"
"""Name of the setting that skips updates, for errors."""


class UpdateGuard(StepPart):
    """Checks gradients before each update, and restores the buffers of a step whose loss or update was not finite.

    A check waits for the device. The copy of the buffers takes as much memory as they do, and is renewed in every step.

    Args:
        discovered: The trainer's objects.
        recover: Accepts or rejects updates.
        group: Process group of the ranks.
        shared: Ids of the optimizers whose updates are the same on all ranks; empty on a single rank.
        rank_local: Ids of the parameters whose gradients differ by rank on purpose.
        scales: Whether a gradient scaler may skip updates. It does not report them, so only a loss that is not finite
            distinguishes a fault from an ordinary overflow.

    Raises:
        ContractError: The trainer has no optimizer whose updates could be skipped, or uses LBFGS.
    """

    def __init__(
        self,
        discovered: Discovered,
        recover: Recover,
        *,
        group: dist.ProcessGroup | None = None,
        shared: Collection[int] = (),
        rank_local: Collection[int] = (),
        scales: bool = False,
    ) -> None:
        self._scales = scales
        self.may_skip = SKIPPER
        _check_can_skip(discovered)
        self._recover = recover
        self._group = group
        self._shared = shared
        self._rank_local = rank_local
        self._modules = [found.value for found in discovered.modules]
        self._optimizers = [found.value for found in discovered.optimizers]
        self._places: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        """The dict of buffers of each module that has any, and a copy of the dict from before the step."""
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        """Each buffer and its values from before the step, by the id of the buffer."""
        self._losses: list[Tensor] = []
        """Losses of the backward calls since the last update; the first `_losses_before` are from earlier steps."""
        self._losses_before = 0
        self._has_asked = self._has_skipped = False
        self._rates: list[tuple[dict[str, Any], Any]] = []
        """Parameter groups of the running update whose rate `Recover` has lowered, and their original rate."""

    @override
    @torch.no_grad()
    def begin(self, step: int) -> None:
        if self._has_asked or not self._recover.judges_losses:
            self._losses.clear()
        self._losses_before = len(self._losses)
        self._has_asked = self._has_skipped = False
        owners = [part._buffers for module in self._modules for part in module.modules() if part._buffers]
        self._places = [(buffers, dict(buffers)) for buffers in owners]
        before, self._saved = self._saved, {}
        for buffer in (buffer for _, held in self._places for buffer in held.values()):
            if buffer is None or isinstance(buffer, DTensor) or is_lazy(buffer):
                continue
            same, copy = before.get(id(buffer), (None, buffer))
            if same is not buffer or not _is_alike(buffer, copy):
                copy = torch.empty_like(buffer)
            self._saved[id(buffer)] = buffer, copy.copy_(buffer)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        """Begin backward with a gradient of nan if the loss is not finite."""
        call.gradients = tuple(map(self._first_gradient, call.outputs, call.gradients))

    @torch.no_grad()
    def _first_gradient(self, output: Any, gradient: Any) -> Any:
        if not isinstance(gradient, Tensor) or isinstance(gradient, DTensor) or output.numel() != 1:
            return gradient  # `output` is no loss; other values may be infinite although the loss is finite
        loss = output.detach()
        self._losses.append(loss)
        return torch.where(torch.isfinite(loss), gradient, torch.nan)

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        if not self._scales and not self._accepts(optimizer):
            return False
        factor = self._recover.rate_factor
        if factor != 1.0:  # the rate is lowered only during this update, so that schedules do not see it
            self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
            for group, rate in self._rates:
                group["lr"] = rate * factor
        return True

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def _accepts(self, optimizer: Optimizer) -> bool:
        """Whether `Recover` accepts the update of `optimizer`; the same on all ranks unless it is rank-local."""
        parameters = list(parameters_of(optimizer))
        gradients = [
            p.grad if p.grad.layout == torch.strided else p.grad.coalesce().values()
            for p in parameters
            if p.grad is not None
        ]
        is_finite = are_finite(gradients)
        needs_loss = self._recover.judges_losses or not is_finite
        loss = self._largest_loss(self._losses) if needs_loss else None
        if id(optimizer) in self._shared and (  # gradients of shards and of rank-local parameters differ between ranks
            needs_loss or any(isinstance(p, DTensor) or id(p) in self._rank_local for p in parameters)
        ):
            sound, loss = self._max_over_ranks([0.0 if is_finite else math.nan, loss])
            is_finite = sound == 0
        return self._ask_recover(is_finite=is_finite, loss=loss)

    def _ask_recover(self, *, is_finite: bool, loss: float | None) -> bool:
        self._has_asked = True
        may_update = self._recover.may_update(is_finite=is_finite, loss=loss)
        self._has_skipped = self._has_skipped or not may_update
        return may_update

    def _largest_loss(self, losses: list[Tensor]) -> float | None:
        """Return the largest of `losses`; ``nan`` if one is not finite."""
        if not losses:
            return None
        numbers = torch.stack([loss.reshape(()).float() for loss in losses])
        largest, are_sound = torch.stack([numbers.max(), numbers.isfinite().all()]).tolist()
        return float(largest) if are_sound else math.nan

    def _max_over_ranks(self, values: list[float | None]) -> list[float | None]:
        """Return the maximum over all ranks of each value; ``nan`` if a rank has nan, None if all ranks have None."""
        sent = [-math.inf if value is None else math.inf if math.isnan(value) else value for value in values]
        tensor = torch.tensor(sent, dtype=torch.float64, device=next(parameters_of(self._optimizers[0])).device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [None if each == -math.inf else math.nan if each == math.inf else each for each in tensor.tolist()]

    @override
    @torch.no_grad()
    def end(self) -> None:
        """Restore the buffers if the loss or an update of the step was not finite.

        This includes buffers that the step resized, cast or replaced.
        """
        loss = self._largest_loss(self._losses[self._losses_before :])
        if self._scales:  # the scaler has skipped updates with overflows itself; only the loss shows a fault
            self._ask_recover(is_finite=True, loss=self._max_over_ranks([loss])[0] if self._shared else loss)
        if self._has_skipped or (loss is not None and math.isnan(loss)):
            for buffers, held in self._places:
                buffers.clear()
                buffers.update(held)
            for buffer, copy in self._saved.values():
                if _is_alike(buffer, copy):
                    buffer.copy_(copy)
                else:
                    buffer.data = copy.clone()


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def update_guard(
    trainer: pl.Trainer,
    discovered: Discovered,
    *,
    group: dist.ProcessGroup | None,
    shared: Collection[int],
    rank_local: Collection[int],
    scales: bool,
) -> UpdateGuard | None:
    """Return the guard for the `Recover` callback of `trainer`, if there is one; arguments as in `UpdateGuard`.

    Raises:
        ContractError: `UpdateGuard` refuses the trainer, or an optimizer is rank-local although `Recover` may lower
            the rate or roll back: then all ranks must make equal updates.
    """
    recover = next((each for each in callbacks_of(trainer) if isinstance(each, Recover)), None)
    if recover is None:
        return None
    own = [found.path for found in discovered.optimizers if id(found.value) not in shared]
    if trainer.world_size > 1 and own and {*recover.ladder} != {"skip"}:  # only one rank sees its own faults
        raise ContractError(
            "`lower_lr` and `roll_back` need updates that all ranks make alike, but the updates of "
            f"{', '.join(own)} are rank-local. Use `on_nonfinite: skip`, or one device."
        )
    return UpdateGuard(discovered, recover, group=group, shared=shared, rank_local=rank_local, scales=scales)


def _check_can_skip(discovered: Discovered) -> None:
    """Refuse a trainer without an optimizer whose updates can be skipped."""
    instead = "Use `on_nonfinite: stop`, or skip such updates in `train_step`."
    if not discovered.optimizers:
        raise ContractError(
            f"{SKIPPER} needs an optimizer, in the state or on the trainer, whose updates can be skipped; "
            f"this trainer has none. {instead}"
        )
    refused = [found.path for found in discovered.optimizers if isinstance(found.value, LBFGS)]
    if refused:
        raise ContractError(
            f"{SKIPPER} cannot skip an update of {', '.join(refused)}: LBFGS evaluates the loss "
            f"several times within it. {instead}"
        )
