"""Applies Lightning's precision plugins to a trainer that calls ``loss.backward()`` itself."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import LBFGS

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered
from .fp16 import TrueUnitScaler

log = logging.getLogger(__name__)

_DTYPES = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "bf16"}
"""The value of ``ctx.dtype`` by the precision of a plugin."""


@dataclass(frozen=True)
class StepPrecision:
    """Actions of a precision around and inside a ``train_step``; in fp32, all fields but `dtype` are None."""

    dtype: str
    """The value of ``ctx.dtype``: ``fp32``, ``bf16`` or ``fp16``."""
    context: Callable[[], AbstractContextManager[None]] | None = None
    """Returns the context of a step: autocast, or a default dtype of torch."""
    autocast_device: str | None = None
    """The device type whose autocast is switched off for backward and update, as torch recommends."""
    scaler: TrueUnitScaler | None = None
    cast_inputs_to: torch.dtype | None = None
    """Type to which modules in true half precision cast floating inputs."""


def contract_dtype(plugin: Precision) -> str:
    """Return ``ctx.dtype`` for a precision plugin.

    Raises:
        ContractError: The precision of the plugin is not in `_DTYPES`, or the plugin replaces layers.
    """
    precision = str(plugin.precision)
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision) or precision not in _DTYPES:
        raise ContractError(
            f"{type(plugin).__name__} ({precision}) cannot host a trainer class: use Lightning's {', '.join(_DTYPES)}. "
            "For other types of weights, build the modules in that type in `configure`, under 32-true."
        )
    return _DTYPES[precision]


def step_precision(plugin: Precision, discovered: Discovered) -> StepPrecision:
    """Return the actions of `plugin` in each step, for the trainer's objects.

    Under ``16-mixed`` a `TrueUnitScaler` replaces the plugin's scaler, so that Lightning saves and restores it. If the
    trainer has its own `GradScaler`, that one is kept and there is no second scaler.

    Raises:
        ContractError: The plugin cannot host a trainer class, or an optimizer cannot be used with a scaler.
    """
    dtype = contract_dtype(plugin)
    if isinstance(plugin, MixedPrecision):
        return StepPrecision(
            dtype=dtype,
            context=plugin.autocast_context_manager,
            autocast_device=plugin.device,
            scaler=_install_scaler(plugin, discovered),
        )
    if isinstance(plugin, HalfPrecision):
        return StepPrecision(dtype, plugin.forward_context, cast_inputs_to=torch.bfloat16)
    return StepPrecision(dtype)


def _install_scaler(plugin: MixedPrecision, discovered: Discovered) -> TrueUnitScaler | None:
    """Make `plugin` use a `TrueUnitScaler`, and return it; None if the loss is not scaled here."""
    if plugin.scaler is None:
        return None
    own = [found.path for found in discovered.scalers if found.value.is_enabled()]
    if own:
        log.info("%s scales the loss already; genlight does not scale it again.", ", ".join(own))
        return None
    refused = [found.path for found in discovered.optimizers if isinstance(found.value, LBFGS)]
    if refused:
        raise ContractError(
            f"{', '.join(refused)} is LBFGS. It evaluates the loss several times in a step, so an overflow of 16-mixed "
            "could not be skipped. Use bf16-mixed or 32-true."
        )
    if not isinstance(plugin.scaler, TrueUnitScaler):
        plugin.scaler = TrueUnitScaler.like(plugin.scaler)
    return plugin.scaler


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Let `modules` accept floating inputs of any precision.

    Torch's layers in `modules` also cast their inputs to `dtype`, because a trainer may call a part or a method of a
    module directly.
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

    called = {m for module in modules for m in (module, *filter(_is_layer_with_weights, module.modules()))}
    for module in called:
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _is_layer_with_weights(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.") and any(
        parameter is not None for parameter in module._parameters.values()
    )


def explain_dtype_error(error: BaseException, precision: StepPrecision) -> ContractError | None:
    """Return an error with the way out for `error` in half precision; None if it is not about types."""
    if precision.context is None or not isinstance(error, RuntimeError) or isinstance(error, ContractError):
        return None
    if not re.search(r"dtype|BFloat16|Half|same type", str(error)):
        return None
    why = (
        f"under {precision.dtype}-mixed, layers compute in half precision, but operations outside of layers need "
        "operands of one type. Cast them (`p.grad = g.to(p.dtype)`, `out.double()`), compute such parts within "
        "`torch.autocast(device, enabled=False)`, or use 32-true"
        if precision.cast_inputs_to is None
        else f"weights are {precision.cast_inputs_to} here, and tensors that meet them outside of a module's call "
        f"need the same type. Create such tensors in the weights' type, or use {precision.dtype}-mixed"
    )
    return ContractError(f"`train_step` mixes types: {why}. torch says: {str(error).partition(chr(10))[0]}")
