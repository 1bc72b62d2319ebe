"""Helpers for trainer classes: seeds, scalars, AdamW, a LoRA-style checkpoint.

`lora_checkpoint.py` has the checkpoint; `components.py` loads the safetensors files of a model folder. All helpers work
without genlight's runtime. They import torch when they are called, so that importing this module is cheap. This folder
may import the contract, plumbing and callbacks.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .lora_checkpoint import load_trainable_module_checkpoint, save_trainable_module_checkpoint

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR

__all__ = [
    "OptimizerBundle",
    "build_default_adamw_bundle",
    "load_trainable_module_checkpoint",
    "save_trainable_module_checkpoint",
    "seed_everything",
    "to_float_scalar",
]

WARMUP_START = 0.1
"""Share of the peak learning rate at which a warm-up begins."""


def seed_everything(seed: int) -> int:
    """Seed the random numbers of Python, NumPy and torch (CPU and every device); return the seed.

    Raises:
        ValueError: `seed` is not in 0 … 2**32 - 1, the range that NumPy accepts.
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
    """Return `value` as a Python float: a number, a NumPy scalar, or a tensor or array with one element.

    Synchronizes with the device of a tensor; call this at a cadence, not in every step.

    Raises:
        TypeError: `value` is not a number, such as a string or None.
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
    """An optimizer and its learning rate schedule, which may be None; unpacks as a pair."""

    optimizer: Any = None
    """A `torch.optim.Optimizer`."""
    scheduler: Any = None
    """A `torch.optim.lr_scheduler.LRScheduler`."""


def build_default_adamw_bundle(
    model_or_params: torch.nn.Module | Iterable[Any] | None,
    hyperparams: Mapping[str, Any] | None = None,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    warmup_steps: int | None = None,
    max_steps: int | None = None,
) -> OptimizerBundle:
    """Return AdamW over all of `model_or_params`, with warm-up for `warmup_steps` and cosine decay to `max_steps`.

    Each setting comes from the argument, or else from the entry of `hyperparams` with that name (``learning_rate``
    before ``lr``), or else it is the default. Call ``scheduler.step()`` once after each ``optimizer.step()``. The
    scheduler also loads the ``state_dict()`` of the older runtime's scheduler.

    Args:
        model_or_params: A module, parameters, or parameter groups. Frozen parameters are included, because they may be
            unfrozen later. None gives an empty bundle.
        hyperparams: Usually ``ctx.job.hyperparams``; entries with other names are ignored.
        lr: Peak learning rate. Default 1e-4.
        weight_decay: Default 0.0.
        betas: Default (0.9, 0.999).
        eps: Default 1e-8.
        warmup_steps: Steps over which the rate rises linearly from a tenth of its peak to the peak. Default 0.
        max_steps: The step at which the cosine decay reaches 0. Default 0: no scheduler.

    Raises:
        ValueError: There are no parameters, or a number is out of range.
    """
    if model_or_params is None:
        return OptimizerBundle()
    import torch

    settings = hyperparams or {}

    def setting(name: str, value: Any, default: Any) -> Any:
        return value if value is not None else settings.get(name, default)

    entries = model_or_params.parameters() if isinstance(model_or_params, torch.nn.Module) else model_or_params
    groups: list[Any] = [dict(entry) if isinstance(entry, Mapping) else entry for entry in entries]
    rate = lr if lr is not None else settings.get("learning_rate", settings.get("lr", 1e-4))
    optimizer = torch.optim.AdamW(
        groups,  # copies of the caller's groups, because AdamW writes into them
        lr=float(rate),
        weight_decay=float(setting("weight_decay", weight_decay, 0.0)),
        betas=tuple(setting("betas", betas, (0.9, 0.999))),
        eps=float(setting("eps", eps, 1e-8)),
    )
    total, warmup = int(setting("max_steps", max_steps, 0)), int(setting("warmup_steps", warmup_steps, 0))
    for name, number in (("max_steps", total), ("warmup_steps", warmup)):
        if number < 0:
            raise ValueError(f"Invalid `{name}`. Expected an integer >= 0, but received {number}.")

    def share_of_peak(step: int) -> float:
        if step < warmup:
            return WARMUP_START + (1 - WARMUP_START) * step / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

    return OptimizerBundle(optimizer, _lambda_schedule()(optimizer, share_of_peak) if total else None)


@functools.cache
def _lambda_schedule() -> type[LambdaLR]:
    """Return the class of the scheduler; it is made here, because this module does not import torch."""
    from torch.optim.lr_scheduler import LambdaLR

    class ScheduleByStep(LambdaLR):
        """A `LambdaLR` that also loads the position from states of the older runtime's schedulers."""

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if "lr_lambdas" not in state_dict:
                kept = ("last_epoch", "_step_count", "_last_lr")
                state_dict = {**self.state_dict(), **{name: state_dict[name] for name in kept if name in state_dict}}
            super().load_state_dict(state_dict)

    return ScheduleByStep
