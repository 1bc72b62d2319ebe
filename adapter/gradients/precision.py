"""What a precision plugin means for a trainer that calls ``loss.backward()`` itself.

Under ``16-mixed`` the loss is scaled before backward so that small gradients survive, and every parameter's gradient
is unscaled before it is accumulated. So whatever reads a gradient (clipping, a norm for a metric, a gradient hook)
reads true units, also over several backward calls and several losses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from .torch_internals import amp_foreach_non_finite_check_and_unscale

__all__ = [
    "AutocastOff",
    "StepPrecision",
    "TrueUnitScaler",
    "about_types",
    "cast_inputs",
    "contract_dtype",
    "step_precision",
]

log = logging.getLogger(__name__)

_DTYPES = {"32": "fp32", "bf16": "bf16", "16": "fp16", "64": "fp64"}


@dataclass(frozen=True)
class StepPrecision:
    """What has to be done around and inside a ``train_step``; all of it None or empty in fp32."""

    dtype: str
    """As ``ctx.dtype`` has it: ``fp32``, ``bf16``, ``fp16`` or ``fp64``."""
    context: Callable[[], AbstractContextManager[None]] | None = None
    """Around the step: autocast, or torch's default dtype."""
    autocast_device: str | None = None
    """The device type whose autocast is switched off for backward and update, as torch recommends."""
    scaler: TrueUnitScaler | None = None
    cast_inputs_to: torch.dtype | None = None
    """Modules in true half precision get floating inputs in this type."""


def contract_dtype(plugin: Precision) -> str:
    """``ctx.dtype`` under a precision plugin.

    Raises:
        ContractError: The plugin swaps the layers of a module for its own after the trainer's optimizer was built.
    """
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision, DoublePrecision):
        raise ContractError(
            f"Precision {type(plugin).__name__} cannot host a trainer class: it replaces layers after `configure` has "
            "given their parameters to an optimizer. Use 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true or 64-true."
        )
    return _DTYPES[str(plugin.precision).partition("-")[0]]


def step_precision(plugin: Precision, discovered: Discovered) -> StepPrecision:
    """What `plugin` asks of each step, given what the trainer built.

    Under ``16-mixed`` the plugin's scaler is replaced by one that keeps true units, so that Lightning saves and
    restores it. A trainer that brought a `GradScaler` of its own keeps it and gets no second one.

    Raises:
        ContractError: The plugin cannot host a trainer class, or an optimizer cannot be used with a scaler.
    """
    dtype = contract_dtype(plugin)
    if isinstance(plugin, MixedPrecision):
        return StepPrecision(
            dtype=dtype,
            context=plugin.autocast_context_manager,
            autocast_device=plugin.device,
            scaler=_scaler(plugin, discovered),
        )
    if isinstance(plugin, HalfPrecision):
        half = torch.bfloat16 if dtype == "bf16" else torch.float16
        return StepPrecision(dtype=dtype, context=plugin.forward_context, cast_inputs_to=half)
    if isinstance(plugin, DoublePrecision):
        return StepPrecision(dtype=dtype, context=plugin.forward_context, cast_inputs_to=torch.float64)
    return StepPrecision(dtype=dtype)


def _scaler(plugin: MixedPrecision, discovered: Discovered) -> TrueUnitScaler | None:
    if plugin.scaler is None:
        return None
    own = [found.path for found in discovered.scalers if found.value.is_enabled()]
    if own:
        log.info("%s scales the loss already; genlight adds no scaling of its own to it.", ", ".join(own))
        return None
    refused = [found.path for found in discovered.optimizers if isinstance(found.value, LBFGS)]
    if refused:
        raise ContractError(
            f"{', '.join(refused)} is LBFGS, which evaluates the loss several times a step and so cannot skip an "
            "overflow of 16-mixed. Use bf16-mixed or 32-true."
        )
    if not isinstance(plugin.scaler, TrueUnitScaler):
        plugin.scaler = TrueUnitScaler.like(plugin.scaler)
    return plugin.scaler


class TrueUnitScaler(GradScaler):
    """A gradient scaler for gradients that are unscaled before they are accumulated.

    Its own unscale step changes nothing: it only reports the infinities that `check` saw after the backward, before
    anybody clipped them away.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._found: dict[int, Tensor] = {}
        self._stepped: set[int] = set()
        """Optimizers that stepped since the scale was adapted."""
        self._overflows: Tensor | float = 0.0
        self._found_by_hand: Tensor | None = None
        """What `check_by_hand` found since the scale was adapted."""

    @classmethod
    def like(cls, scaler: GradScaler) -> TrueUnitScaler:
        """A scaler with the settings and the progress of `scaler`."""
        mine = cls(
            scaler._device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
        if scaler.is_enabled():
            mine.load_state_dict(scaler.state_dict())
        return mine

    @property
    def overflow_steps(self) -> int:
        """Updates that were skipped because a gradient was not finite; reads from the device."""
        return int(self._overflows)

    def inverse_scale(self) -> Tensor:
        """What a scaled gradient is multiplied by; exact, because scales are powers of two."""
        scale = self._scale
        assert scale is not None, "the loss is scaled before its gradients are unscaled"
        return scale.double().reciprocal().float()

    @torch.no_grad()
    def check(self, optimizer: Optimizer) -> None:
        """Remember whether a gradient of `optimizer` is not finite, without waiting for the device."""
        found = _overflowed([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
        if found is None:
            return
        by_hand = self._found_by_hand
        self._found[id(optimizer)] = found if by_hand is None else torch.maximum(found, by_hand.to(found.device))

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

    def step_checked(self, optimizer: Optimizer, step: Callable[[], Any], *, adapt: bool = True) -> Any:
        """Run `step` unless the gradients overflowed, and adapt the scale.

        Args:
            optimizer: The optimizer that `step` updates by.
            step: Calls ``optimizer.step`` of this scaler's wrapper, or the bare one where nothing was scaled.
            adapt: False leaves the scale to a later `adapt`, or to a second step of `optimizer`.
        """
        found = self._found.pop(id(optimizer), None)
        if found is None:  # no backward since the last update: nothing was scaled
            return step()
        self._found[id(optimizer)] = found
        if id(optimizer) in self._stepped:
            self.adapt()
        if self._scale is None:  # all gradients so far were written by the trainer
            self._lazy_init_scale_growth_tracker(found.device)
        self.unscale_(optimizer)
        result = self.step(optimizer)
        self._stepped.add(id(optimizer))
        if adapt:
            self.adapt()
        self._found.pop(id(optimizer), None)
        self._overflows = self._overflows + found
        return result

    def adapt(self) -> None:
        """Adapt the scale, if there were steps since that was last done."""
        if self._stepped:
            self._stepped.clear()
            self._found_by_hand = None
            self.update()

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = self._found[id(optimizer)]
        return {found.device: found}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "overflow_steps": self.overflow_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._overflows = float(state_dict.get("overflow_steps", 0))


def _overflowed(grads: Sequence[Tensor]) -> Tensor | None:
    """One where one of `grads` is not finite, else zero, on a device; None without any."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = _real_values(grad)
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


class AutocastOff:
    """``torch.autocast(device, enabled=False)`` for a fraction of its cost, to be entered again and again, also nested.

    Args:
        device: The type of device whose autocast is switched off.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._was_on: list[bool] = []

    def __enter__(self) -> None:
        self._was_on.append(torch.is_autocast_enabled(self._device))
        torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device, self._was_on.pop())


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype) -> list[Any]:
    """Let `modules` take floating inputs of any precision; returns the handles that undo it.

    So do torch's own layers in them, which insist on inputs of their weights' type: a trainer may call a part of a
    module, or a method, and not the module.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
        if isinstance(value, dict):
            return {k: cast(v) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(cast(v) for v in value)
        return value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast(args), cast(kwargs)

    entered = {id(m): m for module in modules for m in (module, *filter(_insists_on_its_type, module.modules()))}
    return [module.register_forward_pre_hook(hook, with_kwargs=True) for module in entered.values()]


def _insists_on_its_type(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.") and any(
        parameter is not None for parameter in module._parameters.values()
    )


def about_types(error: BaseException, precision: StepPrecision) -> ContractError | None:
    """An error that says what to do about `error` in half precision; None where it is about something else."""
    if precision.context is None or not isinstance(error, RuntimeError) or isinstance(error, ContractError):
        return None
    if not re.search(r"dtype|BFloat16|Half|same type", str(error)):
        return None
    if precision.cast_inputs_to is None:
        return ContractError(
            f"`train_step` mixes types: under {precision.dtype}-mixed, layers compute in half precision, and what is "
            "computed with their outputs by hand has to be of one type with its partners. Cast it (`p.grad = "
            "g.to(p.dtype)`, `out.double()`), compute such parts within `torch.autocast(device, enabled=False)`, or "
            f"use 32-true. torch says: {str(error).partition(chr(10))[0]}"
        )
    return ContractError(
        f"`train_step` mixes types: weights are {precision.cast_inputs_to} here, and what it computes with them "
        "outside of a module's call has to be so too. Make such tensors of the weights' type, or use "
        f"{precision.dtype}-mixed. "
        f"torch says: {str(error).partition(chr(10))[0]}"
    )
