"""Turn the result of a step into named scalars."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..contract.exceptions import ContractError
from ..contract.types import StepContext

_ALIASES = {
    "loss": "train/loss",
    "train_loss": "train/loss",
    "lr": "train/lr",
    "learning_rate": "train/lr",
    "train_lr": "train/lr",
}
_LR = "train/lr"


_reported_names: dict[str, str] = {}
"""Cache of `metric_name`; a dict lookup is cheaper per step than even a cached call."""
_MOST_NAMES = 1024


def metric_name(name: object) -> str:
    """Return the name under which a metric is reported: aliases of loss and learning rate become ``train/…``.

    Case and surrounding blanks are ignored in aliases and kept in other names.

    Raises:
        ContractError: `name` is not a string, or is empty.
    """
    if not isinstance(name, str) or not name:
        raise ContractError(f"train_step returned a metric named {name!r}; a name is a non-empty string")
    reported = _ALIASES.get(name.strip().lower(), name)
    if len(_reported_names) >= _MOST_NAMES:
        _reported_names.clear()
    _reported_names[name] = reported
    return reported


def validate_result(result: Any, *, reads_values: bool = False) -> None:
    """Check that the result of ``train_step`` has ``metrics``; does not wait for the device.

    Args:
        result: The result of ``train_step``.
        reads_values: Also check each metric, as `named_scalars` does at a cadence.

    Raises:
        ContractError: `result` has no metrics, or these or ``debug`` are not a mapping, or a metric is not a number.
    """
    metrics = getattr(result, "metrics", None)
    if metrics is None and not hasattr(result, "metrics"):
        hint = "return StepResult(metrics={...})" if isinstance(result, Mapping) else "return a StepResult"
        raise ContractError(f"train_step returned a {_type_name(result)} without `metrics`; {hint}")
    if not isinstance(metrics, Mapping):
        raise ContractError(f"train_step returned metrics that are a {_type_name(metrics)}; they must be a mapping")
    debug = getattr(result, "debug", None)
    if debug is not None and not isinstance(debug, Mapping):
        raise ContractError(f"train_step returned a `debug` that is a {_type_name(debug)}; it must be a mapping")
    for name, value in metrics.items() if reads_values else ():
        reported = metric_name(name)
        # Do not read a value that may be on a device; check only that it has one element or can become a float.
        is_lazy = not isinstance(value, numbers.Real) and hasattr(value, "__float__")
        if not is_lazy or (hasattr(value, "shape") and not _may_be_scalar(value)):
            scalar(reported, value)


def named_scalars(result: Any, state: Any, ctx: StepContext, optimizers: Iterable[Any] = ()) -> dict[str, float]:
    """Return the metrics of a step under their reported names, with the learning rate if it can be found.

    Reading the values waits for the device.

    Args:
        result: A validated step result.
        state: The trainer's opaque state.
        ctx: The context of the run.
        optimizers: Optimizers found in the state. If nothing else has a learning rate, the first optimizer's is used.

    Raises:
        ContractError: A name is not a string or is empty, or a value is neither a number nor a tensor of one element.
    """
    scalars: dict[str, float] = {}
    for name, value in result.metrics.items():
        reported = _reported_names.get(name) or metric_name(name)
        try:
            number = value.item() if type(value) is Tensor else value
        except RuntimeError:  # it has several elements; `scalar` refuses it by name
            number = value
        scalars[reported] = number if type(number) is float else scalar(reported, number)
    if _LR not in scalars:
        rate = None
        # Fast path: usually an optimizer has the rate, and no place that `_learning_rate` searches earlier has one.
        if type(state) is dict and not (
            _LR in state or "learning_rate" in state or "lr" in state or getattr(result, "debug", None)
        ):
            groups = getattr(ctx.optimizer or state.get("optimizer"), "param_groups", None)
            rate = groups[0].get("lr") if groups else None
        if type(rate) is not float:
            rate = _learning_rate(result, state, ctx, optimizers)
        if rate is not None:
            scalars[_LR] = rate if type(rate) is float else scalar(_LR, rate)
    return scalars


def values_on_device(result: Any, published: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the metrics of `result`, and the `published` values of other metrics; does not wait for the device.

    Metrics that are neither tensors nor plain numbers are updated only at a cadence, when `named_scalars` reads them.
    """
    last_step = {} if result is None else result.metrics
    current = {
        metric_name(name): value
        for name, value in last_step.items()
        if isinstance(name, str) and isinstance(value, Tensor | numbers.Real)
    }
    return {name: _as_tensor(name, value) for name, value in {**published, **current}.items()}


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # torch has no type for this number, or it is too large
        return torch.tensor(scalar(name, value), dtype=torch.float64)


def _learning_rate(result: Any, state: Any, ctx: StepContext, optimizers: Iterable[Any]) -> Any:
    """Return the first learning rate in the usual places; None if there is none.

    The search runs at each cadence, because a trainer may add a rate later.
    """
    debug = getattr(result, "debug", None)
    for name, value in debug.items() if debug else ():
        if isinstance(name, str) and metric_name(name) == _LR and _may_be_scalar(value):
            return value
    for name in (_LR, "learning_rate", "lr"):
        value = _entry(state, name)
        if value is not None and _may_be_scalar(value):
            return value
    for optimizer in (ctx.optimizer, _entry(state, "optimizer"), *optimizers):
        groups = None if optimizer is None else getattr(optimizer, "param_groups", None)
        rate = groups[0].get("lr") if groups else None
        if type(rate) is float or (rate is not None and _may_be_scalar(rate)):
            return rate
    return None


def _may_be_scalar(value: Any) -> bool:
    """Whether `value` has the form of one number, unlike a schedule or a list of rates."""
    if isinstance(value, numbers.Real):
        return True
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and math.prod(shape) == 1


def _entry(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def scalar(name: str, value: Any) -> float:
    """Return the value of a metric as a Python number; waits for its device.

    Raises:
        ContractError: `value` is neither a number nor a tensor of one element; names the metric.
    """
    try:
        # A trainer may return its loss undetached; torch warns if `float` gets a tensor with a graph.
        number = value.item() if hasattr(value, "item") else value
        return number if type(number) is float else float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        shape = getattr(value, "shape", None)
        what = f"a tensor of shape {tuple(shape)}" if shape is not None else f"{value!r} ({_type_name(value)})"
        raise ContractError(f"metric {name!r} is {what}; a metric is one number or a 0-d tensor") from None


def _type_name(value: Any) -> str:
    return type(value).__qualname__
