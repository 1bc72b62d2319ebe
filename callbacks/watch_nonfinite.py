"""Losses, gradients and weights that are no longer finite, noticed at a cadence."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ..adapter.contract.exceptions import NonfiniteError
from .finite import are_finite
from .hook.cadence import Boundaries, StepCadence
from .hook.hook import Hook, ending_the_run
from .hook.listeners import skippable

__all__ = ["NONFINITE_STEP", "WatchNonfinite"]

log = logging.getLogger(__name__)

Policy = Literal["warn", "stop"]

NONFINITE_STEP = "trainer/nonfinite_step"
"""Metric: the step at whose end something was first found not to be finite."""

SKIP_IS_REFUSED = (
    "a trainer class updates its weights inside its own step, where nothing outside can take one update back exactly. "
    "Use 'stop' and resume, or leave the update out in the trainer: `if torch.isfinite(loss): optimizer.step()`"
)
"""Why there is no policy that skips updates, and what to do instead."""


class WatchNonfinite(Hook):
    """Notices a loss, gradients or weights that became nan or infinite, says so once, and may end the run.

    At its cadence all weights, their gradients and the losses of the step are looked at together, in one look that
    waits for the device once; on several ranks, on all of them. What is found is told with the step, and goes to every
    logger as the metric ``trainer/nonfinite_step``. Gradients do not count where a gradient scaler is at work, which
    makes them infinite now and then and leaves such updates out. Nor do buffers, in which infinities are common.

    Args:
        policy: ``warn`` says it and goes on; ``stop`` ends the run with an error that names step and tensor, before a
            checkpoint of that step is saved.
        every_n_steps: Cadence in steps; 0 turns it off.

    Raises:
        ValueError: `policy` is unknown, or `every_n_steps` negative.
    """

    ranks: Literal["zero", "all"] = "all"
    writes = ()
    every_n_steps = StepCadence()

    def __init__(self, policy: Policy = "warn", *, every_n_steps: int = 10) -> None:
        if policy not in get_args(Policy):
            hint = f": {SKIP_IS_REFUSED}" if str(policy) == "skip" else ""
            raise ValueError(f"Invalid `policy`. Expected 'warn' or 'stop', but received {policy!r}{hint}.")
        self.policy = policy
        self.every_n_steps = every_n_steps
        self._boundaries = Boundaries(self)
        self._seen_finite_at = 0
        self._has_spoken = False
        self._uses_gradients = True

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._boundaries = Boundaries(self, trainer.global_step)
        self._seen_finite_at = trainer.global_step
        self._has_spoken = False
        self._uses_gradients = not _has_scaler(trainer, pl_module)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self._boundaries.crosses(step) or self._has_spoken:
            return
        looked_at = dict(_looked_at(pl_module, outputs, with_gradients=self._uses_gradients))
        is_finite = are_finite(list(looked_at.values()))
        if trainer.world_size > 1:
            is_finite = trainer.strategy.reduce_boolean_decision(is_finite, all=True)
        if is_finite:
            self._seen_finite_at = step
            return
        self._has_spoken = True
        self._tell(trainer, step, _first_nonfinite(looked_at))

    def _tell(self, trainer: pl.Trainer, step: int, name: str) -> None:
        before = f"; all was finite at step {self._seen_finite_at}" if self._seen_finite_at else ""
        told = f"{name} not finite at step {step}{before}"
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics={NONFINITE_STEP: float(step)}, step=step)
        if self.policy == "stop":
            raise ending_the_run(NonfiniteError(f"{told}. Resume from an earlier checkpoint after the cause is mended"))
        if trainer.is_global_zero:
            log.warning(
                "%s. Training goes on, which `on_nonfinite: stop` of a job, or WatchNonfinite('stop'), would end", told
            )


def _looked_at(
    pl_module: pl.LightningModule, outputs: Any, *, with_gradients: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in outputs.items() if isinstance(outputs, Mapping) else ():
        if isinstance(name, str) and "loss" in name.lower() and isinstance(value, torch.Tensor | float):
            yield f"the metric {name!r} is", torch.as_tensor(value)
    for name, parameter in pl_module.named_parameters():
        yield f"the weights {name!r} are", parameter
    for name, parameter in pl_module.named_parameters() if with_gradients else ():
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            yield f"the gradient of {name!r} is", parameter.grad


def _first_nonfinite(looked_at: Mapping[str, torch.Tensor]) -> str:
    found = next((name for name, tensor in looked_at.items() if not are_finite([tensor])), None)
    return found or "a loss, gradient or weight of another rank is"


def _has_scaler(trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
    """Whether gradients may be scaled: by the precision plugin, or by a scaler of the hosted trainer's own."""
    own = getattr(getattr(pl_module, "discovered", None), "scalers", ())
    return bool(own) or getattr(trainer.precision_plugin, "scaler", None) is not None
