"""Losses, gradients and weights that are no longer finite, noticed at a cadence."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ...adapter.contract.exceptions import NonfiniteError
from ..finite import are_finite
from ..hook.cadence import Boundaries, step_cadence
from ..hook.events import log_to_loggers
from ..hook.hook import Hook, ending_the_run, skippable
from .readings import scaled_by

log = logging.getLogger(__name__)

Policy = Literal["warn", "stop"]

NONFINITE_STEP = "trainer/nonfinite_step"
"""Metric: the step at whose end something was first found not to be finite."""


class WatchNonfinite(Hook):
    """Detects a loss, gradient or weight that became nan or infinite, reports it once, and can end the run.

    At its cadence it checks all weights, their gradients and the losses of the step together, with one device
    synchronization and on all ranks. A finding is reported with its step, and sent to every logger as the metric
    ``trainer/nonfinite_step``. Gradients are not checked while a gradient scaler is active, because the scaler produces
    infinite gradients now and then and skips those updates itself. Buffers are not checked, since infinities are common
    there. `Recover` skips updates that are not finite.

    Args:
        policy: ``warn`` logs a warning and continues. ``stop`` ends the run with an error that names step and tensor,
            before that step is saved.
        every_n_steps: Cadence in steps; 0 turns it off.

    Raises:
        ValueError: `policy` is unknown, or `every_n_steps` negative.
    """

    ranks: Literal["zero", "all"] = "all"

    def __init__(self, policy: Policy = "warn", *, every_n_steps: int = 10) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"Invalid `policy`. Expected 'warn' or 'stop', but received {policy!r}.")
        self.policy = policy
        self.every_n_steps = step_cadence("every_n_steps", every_n_steps)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._boundaries = Boundaries(self, trainer.global_step)
        self._seen_finite_at = trainer.global_step
        self._has_spoken = False
        self._is_scaled = bool(scaled_by(trainer, pl_module))

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self._boundaries.crosses(step) or self._has_spoken:
            return
        examined = dict(_examined(pl_module, outputs, with_gradients=not self._is_scaled))
        is_finite = are_finite(list(examined.values()))
        if trainer.world_size > 1:
            is_finite = trainer.strategy.reduce_boolean_decision(is_finite, all=True)
        if is_finite:
            self._seen_finite_at = step
            return
        self._has_spoken = True
        name = next((name for name, tensor in examined.items() if not are_finite([tensor])), "a value of another rank")
        before = f"; all was finite at step {self._seen_finite_at}" if self._seen_finite_at else ""
        finding = f"{name} is not finite at step {step}{before}"
        if trainer.is_global_zero:
            log_to_loggers(trainer, {NONFINITE_STEP: float(step)}, step)
        if self.policy == "stop":
            raise ending_the_run(
                NonfiniteError(
                    f"{finding}. Resume from an earlier checkpoint after removing the cause, such as a learning rate "
                    "that is too high"
                )
            )
        if trainer.is_global_zero:
            log.warning(
                "%s. Training goes on; `on_nonfinite: stop` in a job, or WatchNonfinite('stop'), would end it", finding
            )

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen_finite_at = trainer.global_step


def _examined(
    pl_module: pl.LightningModule, outputs: Any, *, with_gradients: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that must be finite, with their words."""
    for name, value in outputs.items() if isinstance(outputs, Mapping) else ():
        if isinstance(name, str) and "loss" in name.lower() and isinstance(value, torch.Tensor | float):
            yield f"the metric {name!r}", torch.as_tensor(value)
    for name, parameter in pl_module.named_parameters():
        yield f"the weight {name!r}", parameter
        if with_gradients and parameter.grad is not None and parameter.grad.layout == torch.strided:
            yield f"the gradient of {name!r}", parameter.grad
