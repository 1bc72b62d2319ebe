"""What trainer classes import to save themselves the usual lines: seeds, scalars, AdamW, a LoRA-style checkpoint.

All of it works without genlight's runtime around it. torch is imported when a helper is called, so that importing
this module costs nothing.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .lora_checkpoint import load_trainable_module_checkpoint, save_trainable_module_checkpoint

if TYPE_CHECKING:
    import torch

__all__ = [
    "OptimizerBundle",
    "build_default_adamw_bundle",
    "load_trainable_module_checkpoint",
    "save_trainable_module_checkpoint",
    "seed_everything",
    "to_float_scalar",
]


def seed_everything(seed: int) -> int:
    """Seed the random numbers of Python, NumPy and torch (CPU and every device); returns the seed.

    Raises:
        ValueError: `seed` is not in 0 … 2**32 - 1, which is all that NumPy takes.
        TypeError: `seed` is not an integer.
    """
    import numpy as np
    import torch

    number = operator.index(seed)
    if not 0 <= number < 2**32:
        raise ValueError(f"Invalid `seed`. Expected an integer from 0 to {2**32 - 1}, but received {number}.")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


def to_float_scalar(value: Any) -> float:
    """`value` as a Python float: a number, a NumPy scalar, or a tensor or array with one element.

    A tensor on a device is waited for; call this at a cadence, not in every step.

    Raises:
        TypeError: `value` is no number, such as a text or None.
        ValueError: It has several elements, or none.
    """
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise ValueError(f"Invalid scalar. Expected one element, but received shape {shape}.")
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, str | bytes) or not hasattr(plain, "__float__"):
        raise TypeError(f"Invalid scalar. Expected a number, but received {value!r}.")
    return float(plain)


class OptimizerBundle(NamedTuple):
    """An optimizer and the schedule of its learning rate; unpacks as a pair."""

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def build_default_adamw_bundle(
    parameters: torch.nn.Module | Iterable[Any],
    hyperparams: Mapping[str, Any] | None = None,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    warmup_steps: int | None = None,
    max_steps: int | None = None,
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None,
) -> OptimizerBundle:
    """AdamW over the trainable ones of `parameters`, with linear warm-up and then a schedule.

    Each setting is the argument, else the entry of `hyperparams` with its name (for `lr` also ``learning_rate``),
    else the default. Call ``scheduler.step()`` once after each ``optimizer.step()``.

    Args:
        parameters: A module, parameters, or parameter groups.
        hyperparams: Usually ``ctx.job.hyperparams``; entries of other names are left alone.
        lr: Peak learning rate. Default 1e-4.
        weight_decay: Default 0.01.
        betas: Default (0.9, 0.999).
        eps: Default 1e-8.
        warmup_steps: Steps over which the rate rises to its peak. Default 0.
        max_steps: The step at which ``linear`` and ``cosine`` reach 0; ``ctx.job.max_steps`` as a rule.
        lr_schedule: Default ``constant``.

    Raises:
        ValueError: Nothing is trainable, a number is out of range, or the schedule is unknown or lacks `max_steps`.
    """
    import torch

    given = hyperparams or {}

    def setting(name: str, value: Any, default: Any) -> Any:
        return value if value is not None else given.get(name, default)

    optimizer = torch.optim.AdamW(
        _trainable(parameters),
        lr=float(setting("lr", lr, given.get("learning_rate", 1e-4))),
        weight_decay=float(setting("weight_decay", weight_decay, 0.01)),
        betas=tuple(setting("betas", betas, (0.9, 0.999))),
        eps=float(setting("eps", eps, 1e-8)),
    )
    share = _learning_rate_share(
        setting("lr_schedule", lr_schedule, "constant"),
        warmup=int(setting("warmup_steps", warmup_steps, 0)),
        total=setting("max_steps", max_steps, None),
    )
    return OptimizerBundle(optimizer=optimizer, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, share))


def _trainable(parameters: torch.nn.Module | Iterable[Any]) -> list[Any]:
    import torch

    entries = list(parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters)
    kept = [_trainable_of_group(entry) if isinstance(entry, dict) else entry for entry in entries]
    kept = [entry for entry in kept if (entry["params"] if isinstance(entry, dict) else entry.requires_grad)]
    if not kept:
        raise ValueError("Invalid `parameters`. Expected at least one with requires_grad, but received none.")
    return kept


def _trainable_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    params = [group["params"]] if hasattr(group["params"], "requires_grad") else list(group["params"])
    return {**group, "params": [parameter for parameter in params if parameter.requires_grad]}


def _learning_rate_share(schedule: str, *, warmup: int, total: int | None) -> Callable[[int], float]:
    """The function from a step to the share of the peak rate that applies in it."""
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"Invalid `lr_schedule`. Expected constant, linear or cosine, but received {schedule!r}.")
    if warmup < 0:
        raise ValueError(f"Invalid `warmup_steps`. Expected an integer >= 0, but received {warmup}.")
    if schedule != "constant" and not total:
        raise ValueError(f"Invalid `max_steps`. Expected the number of steps for {schedule!r}, but received {total}.")

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant" or total is None:
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return share
