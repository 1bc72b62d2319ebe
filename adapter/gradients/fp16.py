"""Scales the loss of a trainer that calls ``loss.backward()`` itself, as ``16-mixed`` needs for small gradients.

Each gradient of a parameter is unscaled before it is accumulated. So every reader of a parameter's ``.grad`` (clipping,
a norm for a metric, a bucket that is sent during backward) gets true units, also between backward and update and over
several backward calls and losses. The same holds for hooks of the parameter. Everything else within the graph has the
scale of the loss, as with any gradient scaler: hooks and retained gradients of activations, hooks of modules, and
gradients of inputs, such as for an adversarial example. If a class compares one of these with a constant, use
bf16-mixed.

Gradients of parameters that a step itself creates (a clone or a latent that it trains) are not unscaled, so an update
of such parameters is refused.
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


class Fp16(StepPart):
    """Scales the loss of backward calls, unscales gradients, and skips updates whose gradients overflowed.

    Gradients are checked for overflows after they were averaged, so that all ranks skip the same updates, and before
    the trainer can clip them.

    FSDP accumulates gradients of sharded parameters outside of autograd, so no hook can unscale them. Therefore the
    existing gradients are set aside during the backward call; then the new ones are unscaled and added to them.

    Args:
        scaler: Scales the loss, and adapts the scale.
        discovered: The trainer's objects; the gradients of all parameters and leaf tensors in them are unscaled.
        optimizers: The managed optimizers.
        averages: Whether gradients are averaged over the ranks; `check_averaged` is then called after each exchange.
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
        """Parameters with a hook that unscales their gradients, by id."""
        parameters = [p for found in discovered.modules for p in found.value.parameters()]
        self._sharded = [p for p in parameters if isinstance(p, DTensor)]
        self._set_aside: list[tuple[DTensor, Tensor | None]] = []
        """Sharded parameters and their gradients from before the running backward call."""
        self._inverse: Tensor | None = None
        """The factor that unscales a gradient in the running backward call; None outside of one."""

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
        self._set_aside = [(p, p.grad) for p in self._sharded if p.requires_grad]
        for sharded, _ in self._set_aside:
            sharded.grad = None

    @override
    def leave_backward(self, *, failed: bool) -> None:
        set_aside, self._set_aside = self._set_aside, []
        inverse, self._inverse = self._inverse, None
        if inverse is not None:
            _add_unscaled(set_aside, inverse)

    @override
    def after_backward(self) -> None:
        # FSDP has averaged the gradients of sharded parameters already.
        self._check(self._checked_at_once, sharded=True)
        if not self._averages:
            self.check_averaged()

    def check_averaged(self) -> None:
        """Check the gradients that were just averaged."""
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
        """Refuse an update of parameters that the step itself created: their gradients have the scale of the loss."""
        if any(id(p) not in self._hooked for p in parameters_of(optimizer)):
            raise ContractError(
                f"`train_step` creates a {type(optimizer).__name__} and updates by it, but its gradients have the "
                "scale of 16-mixed. Use bf16-mixed or 32-true."
            )

    def _hook(self, parameter: Tensor) -> None:
        self._hooked[id(parameter)] = parameter
        _register_first(parameter, self._unscale)

    def _unscale(self, gradient: Tensor | None) -> Tensor | None:
        """Return the unscaled gradient, before it is accumulated; None leaves it as it is.

        Nothing is unscaled outside of a backward call, since the loss of torch.autograd.grad is not scaled. An autograd
        function of the trainer may return None as a gradient.
        """
        inverse = self._inverse
        return None if inverse is None or gradient is None else gradient * inverse.to(gradient.device)


class TrueUnitScaler(GradScaler):
    """A gradient scaler for gradients that are unscaled before they are accumulated.

    Nothing calls its `unscale_`. `check` looks for infinities after each backward call, before the trainer can clip
    them. `may_update` uses this result and checks the gradients of the update again, since the trainer may have added
    gradients of earlier backward calls to them.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._overflows: dict[int, Tensor] = {}
        """The latest result of `check` for each optimizer since its last update, by the optimizer's id."""
        self.overflow_steps = 0
        """Updates that were skipped because a gradient was not finite."""
        self._overflow_by_hand: Tensor | None = None
        """The result of `check_by_hand` since the scale was last adapted."""

    @classmethod
    def like(cls, scaler: GradScaler) -> TrueUnitScaler:
        """Return a scaler with the settings and the progress of `scaler`."""
        mine = cls("cpu")
        vars(mine).update(vars(scaler))
        return mine

    def inverse_scale(self) -> Tensor:
        """Return the factor that unscales a gradient; exact, because scales are powers of two."""
        scale = self._scale
        assert scale is not None, "the loss is scaled before its gradients are unscaled"
        return scale.double().reciprocal().float()

    @torch.no_grad()
    def check(self, optimizer: Optimizer) -> None:
        """Remember whether a gradient of `optimizer` is not finite, without waiting for the device."""
        found = self._find_overflow(optimizer)
        if found is not None:
            self._overflows[id(optimizer)] = found

    def _find_overflow(self, optimizer: Optimizer) -> Tensor | None:
        """Return the `_overflow_flag` of `optimizer`'s gradients; also 1 if `check_by_hand` has found an overflow."""
        found = _overflow_flag([p.grad for p in parameters_of(optimizer) if p.grad is not None])
        by_hand = self._overflow_by_hand
        return found if found is None or by_hand is None else torch.maximum(found, by_hand.to(found.device))

    @torch.no_grad()
    def check_by_hand(self, tensors: Iterable[Tensor]) -> None:
        """Set all gradients of `tensors` to zero if one is not finite; no optimizer updates these tensors.

        An update that the trainer makes by hand then changes nothing, and its optimizers skip their update too.
        """
        grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
        found = _overflow_flag(grads)
        if found is None:
            return
        before = self._overflow_by_hand
        self._overflow_by_hand = found if before is None else torch.maximum(found, before.to(found.device))
        for grad in grads:
            values = _real_values(grad)
            values.masked_fill_(found.to(values.device, torch.bool), 0.0)

    @torch.no_grad()
    def may_update(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of `optimizer` are finite; waits for the device, and adapts the scale."""
        after_backward, found = self._overflows.pop(id(optimizer), None), self._find_overflow(optimizer)
        if found is None:  # no parameter has a gradient, so the update changes nothing
            return True
        if after_backward is not None:
            found = torch.maximum(found, after_backward.to(found.device))
        if self._scale is None:  # no backward call has scaled a loss yet: the trainer wrote all gradients itself
            self._lazy_init_scale_growth_tracker(found.device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}
        self.update()
        self._overflow_by_hand = None
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


def _overflow_flag(grads: Sequence[Tensor]) -> Tensor | None:
    """Return a tensor that is 1 if a value in `grads` is not finite, and 0 otherwise; None if there are no `grads`."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = _real_values(grad)
        if 0 in values.stride():  # the kernel cannot write to an expanded tensor, such as a sum's gradient
            values = values.clone()
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    total: Tensor | None = None
    for (device, _), tensors in by_kind.items():
        found = torch.zeros((), dtype=torch.float32, device=device)
        one = torch.ones((), dtype=torch.float32, device=device)
        # This is the kernel of torch's scaler. It multiplies the values by one, so they stay the same.
        amp_foreach_non_finite_check_and_unscale(tensors, found, one)
        total = found if total is None else total + found.to(total.device)
    sharded = next((grad for grad in grads if isinstance(grad, DTensor)), None)
    if sharded is not None and total is not None:  # each rank has checked only its own part
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group())
    return None if total is None else total.clamp_(max=1.0)


def _real_values(grad: Tensor) -> Tensor:
    """Return this rank's values of a gradient as a dense, real tensor that shares its memory."""
    if isinstance(grad, DTensor):
        grad = grad.to_local()
    if grad.layout is not torch.strided:
        grad = grad.coalesce()._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


@torch.no_grad()
def _add_unscaled(set_aside: list[tuple[DTensor, Tensor | None]], inverse_scale: Tensor) -> None:
    """Unscale the gradients of a backward call, and add them to the gradients that were set aside before it."""
    new = [p.grad.to_local() for p, _ in set_aside if isinstance(p.grad, DTensor)]
    if new:
        torch._foreach_mul_(new, inverse_scale.to(new[0].device))
    for parameter, before in set_aside:
        if before is None:
            continue
        if isinstance(parameter.grad, DTensor) and isinstance(before, DTensor):
            before.to_local().add_(parameter.grad.to_local())
        parameter.grad = before


def _register_first(parameter: Tensor, hook: Callable[[Tensor | None], Tensor | None]) -> None:
    """Register a gradient hook that runs before the hooks of the trainer, since they expect true units."""
    handle: RemovableHandle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._backward_hooks
    assert hooks is not None
    # The engine walks the dict below an OrderedDict, whose order `move_to_end` does not change.
    others = {key: other for key, other in hooks.items() if key != handle.id}
    hooks.clear()
    hooks[handle.id] = hook
    hooks.update(others)
