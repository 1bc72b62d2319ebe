"""Losses, gradients and weights that are no longer finite, noticed at a cadence."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ...adapter.contract.exceptions import ContractError, NonfiniteError
from ..finite import are_finite
from ..hook.cadence import Boundaries, StepCadence
from ..hook.events import log_to_loggers
from ..hook.hook import Hook, ending_the_run, skippable
from .readings import scaled_by

__all__ = ["NONFINITE_STEP", "WatchNonfinite"]

log = logging.getLogger(__name__)

Policy = Literal["warn", "stop", "skip"]

MOST_IN_A_ROW = 100
"""Updates left out one after the other, after which nothing says that there will be another one."""

_KEPT = ("left_out", "left_out_in_a_row", "first_left_out_at", "has_spoken")
"""The state that a resumed run continues with."""

NONFINITE_STEP = "trainer/nonfinite_step"
"""Metric: the step at whose end something was first found not to be finite."""


class WatchNonfinite(Hook):
    """Detects a loss, gradient or weight that became nan or infinite, reports it once, and can end the run.

    At its cadence it checks all weights, their gradients and the losses of the step together, with one device
    synchronization and on all ranks. A finding is reported with its step, and sent to every logger as the metric
    ``trainer/nonfinite_step``. Gradients are not checked while a gradient scaler is active, because the scaler produces
    infinite gradients now and then and skips those updates itself. Buffers are not checked, since infinities are common
    there.

    ``skip`` is for trainer classes. It checks the loss of each backward call and the gradients before each
    ``optimizer.step()``. If one of them is not finite, the update is skipped on all ranks; with accumulated gradients
    that is the update of the whole window. Buffers, such as running statistics, are reset to their values before that
    step. Schedulers, and what the trainer updates by hand, continue. The first skipped update is reported at the next
    cadence and the total at the end. The run still ends if a weight is not finite, or after a hundred skipped updates
    in a row. The cost is one device synchronization per update and a copy of the buffers in each step.

    Args:
        policy: ``warn`` logs a warning and continues. ``stop`` ends the run with an error that names step and tensor,
            before that step is saved. ``skip`` skips updates that are not finite.
        every_n_steps: Cadence in steps; 0 turns the checks off, but ``skip`` still skips.

    Raises:
        ValueError: `policy` is unknown, or `every_n_steps` negative.
        ContractError: At the start of the training: `policy` is ``skip``, and the module is not a trainer class whose
            optimizers can skip an update.
    """

    ranks: Literal["zero", "all"] = "all"
    writes = ()
    every_n_steps = StepCadence()
    _of_this_process = frozenset({"_trainer"})
    _trainer: pl.Trainer | None = None

    # What the guard of updates asks, which is there under ``skip``.
    called_by = "on_nonfinite: skip"
    judges_losses = judges_norms = False
    rate_factor = 1.0

    def __init__(self, policy: Policy = "warn", *, every_n_steps: int = 10) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"Invalid `policy`. Expected 'warn', 'stop' or 'skip', but received {policy!r}.")
        self.policy = policy
        self.every_n_steps = every_n_steps
        self._boundaries = Boundaries(self)
        self._seen_finite_at = 0
        self._has_spoken = False
        self._is_scaled = False
        self._left_out = self._left_out_in_a_row = self._first_left_out_at = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":  # a resume restores them after this
            self._left_out = self._left_out_in_a_row = self._first_left_out_at = 0
            self._has_spoken = False

    def may_update(self, loss: float | None, gradient_norm: float | None) -> bool:
        """Whether an update is made, by the gradients of all ranks, which have a norm only if one is not finite."""
        self._count(left_out=gradient_norm is not None)
        return gradient_norm is None

    def note_loss(self, loss: float | None, *, is_scaled: bool) -> None:
        """A step has ended; where a gradient scaler leaves out updates, its loss alone says whether it did."""
        if is_scaled:
            self._count(left_out=loss is not None and math.isnan(loss))

    def _count(self, *, left_out: bool) -> None:
        self._left_out_in_a_row = self._left_out_in_a_row + 1 if left_out else 0
        if left_out and self._trainer is not None:
            self._left_out += 1
            self._first_left_out_at = self._first_left_out_at or self._trainer.global_step + 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}") for name in _KEPT} if self.policy == "skip" else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, f"_{name}", state_dict.get(name, 0))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.policy == "skip" and getattr(pl_module, "discovered", None) is None:
            raise ending_the_run(
                ContractError(
                    f"WatchNonfinite('skip') leaves out updates of a trainer class, in a ContractModule, and "
                    f"{type(pl_module).__name__} is not one. Use 'stop', or return None from `training_step` where the "
                    "loss is not finite."
                )
            )
        self._trainer = trainer
        self._boundaries = Boundaries(self, trainer.global_step)
        self._seen_finite_at = trainer.global_step
        self._is_scaled = bool(scaled_by(trainer, pl_module))

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self._boundaries.crosses(step):
            return
        if self.policy == "skip":
            self._report_left_out(trainer)
            self._refuse_to_train_nothing(step)
        elif self._has_spoken:
            return
        examined = dict(_examined(pl_module, outputs, weights_only=self.policy == "skip", scaled=self._is_scaled))
        if _are_finite_on_all_ranks(trainer, examined):
            self._seen_finite_at = step
        else:
            self._report(trainer, step, _first_nonfinite(examined))

    def _report(self, trainer: pl.Trainer, step: int, name: str) -> None:
        before = f"; all was finite at step {self._seen_finite_at}" if self._seen_finite_at else ""
        finding = f"{name} not finite at step {step}{before}"
        self._log_step(trainer, step)
        if self.policy != "warn":
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

    def _log_step(self, trainer: pl.Trainer, step: int) -> None:
        """Send the metric of the first finding, once."""
        if not self._has_spoken and trainer.is_global_zero:
            log_to_loggers(trainer, {NONFINITE_STEP: float(step)}, trainer.global_step)
        self._has_spoken = True

    def _refuse_to_train_nothing(self, step: int) -> None:
        if self._left_out_in_a_row >= MOST_IN_A_ROW:
            raise ending_the_run(
                NonfiniteError(
                    f"the last {self._left_out_in_a_row} updates before step {step} were left out because a loss or "
                    "gradient was not finite: nothing is trained any more. Resume from an earlier checkpoint after "
                    "the cause is mended, such as a learning rate that is too high"
                )
            )

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen_finite_at = trainer.global_step

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report_left_out(trainer)
        if self._left_out and trainer.is_global_zero:
            log.warning("updates left out because they were not finite: %d", self._left_out)

    def _report_left_out(self, trainer: pl.Trainer) -> None:
        if self._left_out and not self._has_spoken:
            self._log_step(trainer, self._first_left_out_at)
            if trainer.is_global_zero:
                log.warning(
                    "a loss or gradient was not finite at step %d, and its update was left out; training goes on "
                    "without such updates, and their number is logged at the end",
                    self._first_left_out_at,
                )


def _are_finite_on_all_ranks(trainer: pl.Trainer, tensors: Mapping[str, torch.Tensor]) -> bool:
    is_finite = are_finite(list(tensors.values()))
    if trainer.world_size > 1:
        is_finite = trainer.strategy.reduce_boolean_decision(is_finite, all=True)
    return is_finite


def _examined(
    pl_module: pl.LightningModule, outputs: Any, *, weights_only: bool, scaled: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that must be finite, with their words: losses, weights, and gradients unless a scaler overflows."""
    for name, value in outputs.items() if isinstance(outputs, Mapping) and not weights_only else ():
        if isinstance(name, str) and "loss" in name.lower() and isinstance(value, torch.Tensor | float):
            yield f"the metric {name!r} is", torch.as_tensor(value)
    for name, parameter in pl_module.named_parameters():
        yield f"the weights {name!r} are", parameter
    for name, parameter in pl_module.named_parameters() if not (weights_only or scaled) else ():
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            yield f"the gradient of {name!r} is", parameter.grad


def _first_nonfinite(examined: Mapping[str, torch.Tensor]) -> str:
    found = next((name for name, tensor in examined.items() if not are_finite([tensor])), None)
    return found or "a loss, gradient or weight of another rank is"
