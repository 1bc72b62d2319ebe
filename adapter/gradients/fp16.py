"""Scales the loss of a trainer that calls ``loss.backward()`` itself, as ``16-mixed`` needs for small gradients.

Each gradient of a parameter is unscaled before it is accumulated. So whatever reads ``.grad`` of a parameter
(clipping, a norm for a metric, a bucket that leaves inside of backward) reads true units, also between backward and
update and over several backward calls and losses. So do hooks of the parameter itself. Everything else inside of the
graph has the scale of the loss, as with any gradient scaler: hooks and retained gradients of activations, hooks of
modules, and gradients by inputs, such as an adversarial example. Where one of these is compared with a constant, use
bf16-mixed.

Parameters that a step makes itself (a clone that is trained in it, a latent) are not unscaled: an update of them is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ...callbacks.optimizer_state import parameters_of
from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from .step_part import BackwardCall, StepPart
from .torch_internals import amp_foreach_non_finite_check_and_unscale

__all__ = ["Fp16", "TrueUnitScaler"]


class Fp16(StepPart):
    """Scaled backward calls with unscaled gradients, and updates that are left out where these overflowed.

    Overflows are looked for once gradients are those of all ranks, so that all ranks skip the same updates, and before
    the trainer may clip them away.

    Sharded parameters are not leaves: FSDP adds the reduced gradient to theirs behind autograd's back. What they had is
    taken away for the length of the call, and the new gradient is unscaled before it is added to that.

    Args:
        scaler: Scales, and adapts the scale.
        discovered: What the trainer built; all parameters and leaf tensors in it are unscaled.
        optimizers: The managed ones.
        averages: Whether gradients are averaged over the ranks, after which `check_averaged` is called.
    """

    may_skip = "16-mixed"

    def __init__(
        self, scaler: TrueUnitScaler, discovered: Discovered, optimizers: Sequence[Optimizer], *, averages: bool = False
    ) -> None:
        self._scaler = scaler
        self._discovered = discovered
        self._averages = averages
        self._cannot_skip = not discovered.optimizers and any(True for _ in discovered.updated())
        self._by_hand = discovered.not_optimized()
        sharded = {id(each) for each in optimizers if any(isinstance(p, DTensor) for p in parameters_of(each))}
        self._checked_at_once = [each for each in optimizers if id(each) in sharded]
        self._checked_when_averaged = [each for each in optimizers if id(each) not in sharded]
        self._hooked: dict[int, Tensor] = {}
        parameters = [p for found in discovered.modules for p in found.value.parameters()]
        self._sharded = [p for p in parameters if isinstance(p, DTensor)]
        self._had: list[tuple[DTensor, Tensor | None]] = []
        self._inverse: Tensor | None = None
        """The factor that brings a gradient computed now to true units; None outside of backward calls."""

    @override
    def before_backward(self, call: BackwardCall) -> None:
        if self._cannot_skip:
            raise ContractError(
                "16-mixed needs an optimizer, in the state or on the trainer, whose update it can skip when gradients "
                "overflow; this trainer updates by hand. Use bf16-mixed or 32-true."
            )
        for parameter in (*self._discovered.updated(), *self._by_hand):
            if id(parameter) not in self._hooked and parameter.requires_grad and not isinstance(parameter, DTensor):
                self._hook(parameter)
        call.gradients = tuple(g if g is None else self._scaler.scale(g) for g in call.gradients)
        self._inverse = self._scaler.inverse_scale()
        self._had = [(p, p.grad) for p in self._sharded if p.requires_grad]
        for sharded, _ in self._had:
            sharded.grad = None

    @override
    def leave_backward(self, *, failed: bool) -> None:
        had, self._had = self._had, []
        inverse, self._inverse = self._inverse, None
        if inverse is not None:
            _add_unscaled(had, inverse)

    @override
    def after_backward(self) -> None:
        # Gradients of sharded parameters are those of all ranks by now.
        self._check(self._checked_at_once, sharded=True)
        if not self._averages:
            self.check_averaged()

    def check_averaged(self) -> None:
        """Look at the gradients that were averaged, which are those of all ranks now."""
        self._check(self._checked_when_averaged, sharded=False)

    def _check(self, optimizers: Sequence[Optimizer], *, sharded: bool) -> None:
        self._scaler.check_by_hand(p for p in self._by_hand if isinstance(p, DTensor) == sharded)
        for optimizer in optimizers:
            self._scaler.check(optimizer)

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        return self._scaler.may_update(optimizer)

    @override
    def before_foreign_update(self, optimizer: Optimizer) -> None:
        """Refuse to update parameters that the step made: their gradients have the scale of the loss."""
        if any(id(p) not in self._hooked for p in parameters_of(optimizer)):
            raise ContractError(
                f"`train_step` updates by a {type(optimizer).__name__} that it made, by gradients that have the scale "
                "of 16-mixed. Use bf16-mixed or 32-true."
            )

    def _hook(self, parameter: Tensor) -> None:
        self._hooked[id(parameter)] = parameter
        _register_first(parameter, self._unscaled)

    def _unscaled(self, gradient: Tensor | None) -> Tensor | None:
        """Before accumulation; for torch.autograd.grad, whose loss is not scaled, there is nothing to undo.

        A function of the trainer's own may give a parameter no gradient.
        """
        inverse = self._inverse
        return None if inverse is None or gradient is None else gradient * inverse.to(gradient.device)


class TrueUnitScaler(GradScaler):
    """A gradient scaler for gradients that are unscaled before they are accumulated.

    It is not asked to unscale. `may_update` counts the infinities that `check` saw after the last backward call, before
    the trainer could clip them away, and those in the gradients of the update itself, to which a trainer may have added
    what earlier backward calls had left.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._found: dict[int, Tensor] = {}
        """By the id of an optimizer, since its last update."""
        self.overflow_steps = 0
        """Updates that were skipped because a gradient was not finite."""
        self._found_by_hand: Tensor | None = None
        """The result of `check_by_hand` since the scale was adapted."""

    @classmethod
    def like(cls, scaler: GradScaler) -> TrueUnitScaler:
        """A scaler with the settings and the progress of `scaler`."""
        mine = cls("cpu")
        vars(mine).update(vars(scaler))
        return mine

    def inverse_scale(self) -> Tensor:
        """The factor for a scaled gradient; exact, because scales are powers of two."""
        scale = self._scale
        assert scale is not None, "the loss is scaled before its gradients are unscaled"
        return scale.double().reciprocal().float()

    @torch.no_grad()
    def check(self, optimizer: Optimizer) -> None:
        """Remember whether a gradient of `optimizer` is not finite, without waiting for the device."""
        found = self._find(optimizer)
        if found is not None:
            self._found[id(optimizer)] = found

    def _find(self, optimizer: Optimizer) -> Tensor | None:
        """One if a gradient of `optimizer` is not finite, otherwise zero; None without any gradient."""
        found = _overflowed([p.grad for p in parameters_of(optimizer) if p.grad is not None])
        by_hand = self._found_by_hand
        return found if found is None or by_hand is None else torch.maximum(found, by_hand.to(found.device))

    @torch.no_grad()
    def check_by_hand(self, tensors: Iterable[Tensor]) -> None:
        """Make the gradients of `tensors`, which no optimizer updates, zeros if one is not finite.

        A trainer that updates them itself changes nothing by those, and its optimizers skip the update too.
        """
        grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
        found = _overflowed(grads)
        if found is None:
            return
        before = self._found_by_hand
        self._found_by_hand = found if before is None else torch.maximum(found, before.to(found.device))
        for grad in grads:
            values = _real_values(grad)
            values.masked_fill_(found.to(values.device, torch.bool), 0.0)

    @torch.no_grad()
    def may_update(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of `optimizer` are finite; waits for the device, and adapts the scale."""
        after_backward, found = self._found.pop(id(optimizer), None), self._find(optimizer)
        if found is None:  # there is nothing to update by
            return True
        if after_backward is not None:
            found = torch.maximum(found, after_backward.to(found.device))
        if self._scale is None:  # all gradients so far were written by the trainer
            self._lazy_init_scale_growth_tracker(found.device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}
        self.update()
        self._found_by_hand = None
        has_overflowed = bool(found)
        self.overflow_steps += has_overflowed
        return not has_overflowed

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "overflow_steps": self.overflow_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.overflow_steps = int(state_dict.get("overflow_steps", 0))


def _overflowed(grads: Sequence[Tensor]) -> Tensor | None:
    """One if one of `grads` is not finite, otherwise zero, on a device; None without any."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = _real_values(grad)
        if 0 in values.stride():  # of a sum, from torch.autograd.grad; the kernel writes
            values = values.clone()
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    total: Tensor | None = None
    for (device, _), tensors in by_kind.items():
        found, one = (make((), dtype=torch.float32, device=device) for make in (torch.zeros, torch.ones))
        # Multiplying by one leaves every value as it is; the kernel is the one that the plain scaler uses.
        amp_foreach_non_finite_check_and_unscale(tensors, found, one)
        total = found if total is None else total + found.to(total.device)
    sharded = next((grad for grad in grads if isinstance(grad, DTensor)), None)
    if sharded is not None and total is not None:  # each rank saw its own part
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group())
    return None if total is None else total.clamp_(max=1.0)


def _real_values(grad: Tensor) -> Tensor:
    """The numbers of a gradient that this rank holds, as a dense tensor of real ones that shares its memory."""
    if isinstance(grad, DTensor):
        grad = grad.to_local()
    if grad.layout is not torch.strided:
        grad = grad.coalesce()._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


@torch.no_grad()
def _add_unscaled(had: list[tuple[DTensor, Tensor | None]], inverse_scale: Tensor) -> None:
    """Unscale what a backward call left in ``p.grad`` of each parameter, and add it to what was there before."""
    new = [p.grad.to_local() for p, _ in had if isinstance(p.grad, DTensor)]
    if new:
        torch._foreach_mul_(new, inverse_scale.to(new[0].device))
    for parameter, before in had:
        if before is None:
            continue
        if isinstance(parameter.grad, DTensor) and isinstance(before, DTensor):
            before.to_local().add_(parameter.grad.to_local())
        parameter.grad = before


def _register_first(parameter: Tensor, hook: Callable[[Tensor | None], Tensor | None]) -> None:
    """Register a gradient hook that runs before those of the trainer, which expect true units."""
    handle: RemovableHandle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._backward_hooks
    assert hooks is not None
    # The engine walks the underlying dict, which an OrderedDict's move_to_end leaves as it is.
    others = {key: other for key, other in hooks.items() if key != handle.id}
    hooks.clear()
    hooks[handle.id] = hook
    hooks.update(others)
