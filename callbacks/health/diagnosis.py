"""The callbacks that notice training that goes wrong.

`WatchNonfinite` looks for values that are not finite; `Diagnosis` names faults with their first step and a remedy.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import msgspec
import torch
import torch.distributed as dist
from typing_extensions import override

from ...adapter.contract.exceptions import NonfiniteError
from ...adapter.plumbing.devices import gather_results, host_group
from ...adapter.plumbing.text import require
from ..finite import are_finite
from ..hook.cadence import Boundaries, next_multiple, step_cadence
from ..hook.events import FIGURES_FIELD, fire, log_to_loggers, publish_figures
from ..hook.hook import Hook, ending_the_run, skippable
from ..telemetry import RunEvents
from .readings import Probe, scaled_by
from .rules import LOSSES_KEPT, Case, Fault, History, Reading, find_faults

log = logging.getLogger(__name__)

Policy = Literal["warn", "stop"]

NONFINITE_STEP = "trainer/nonfinite_step"
"""Metric: the step after which a value was first found not to be finite."""

TIMED_STEPS = 4
"""Number of steps before a check that are timed."""


class WatchNonfinite(Hook):
    """Detects a loss, gradient or weight that became nan or infinite, reports it once, and can end the run.

    At its cadence it checks all weights, their gradients and the losses of the step together, with one device
    synchronization and on all ranks. A finding is reported with its step, and sent to every logger as the metric
    ``trainer/nonfinite_step``. Gradients are not checked while a gradient scaler is active, because the scaler produces
    infinite gradients now and then and skips those updates itself. Buffers are not checked, since infinities are common
    there. It never skips an update; `Recover` skips those that are not finite.

    Args:
        policy: ``warn`` logs a warning and continues. ``stop`` ends the run with an error that names step and tensor,
            before that step is saved.
        every_n_steps: Cadence in steps; 0 turns it off.

    Raises:
        ValueError: `policy` is unknown, or `every_n_steps` negative.
    """

    ranks: Literal["zero", "all"] = "all"

    def __init__(self, policy: Policy = "warn", *, every_n_steps: int = 10) -> None:
        require((policy in get_args(Policy), "policy", "'warn' or 'stop'", policy))
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
        examined = dict(_tensors_to_check(pl_module, outputs, with_gradients=not self._is_scaled))
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
                "%s. Training continues; `on_nonfinite: stop` in a job, or WatchNonfinite('stop'), would end it",
                finding,
            )

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seen_finite_at = trainer.global_step


def _tensors_to_check(
    pl_module: pl.LightningModule, outputs: Any, *, with_gradients: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that must be finite, each with its name in messages."""
    for name, value in outputs.items() if isinstance(outputs, Mapping) else ():
        if isinstance(name, str) and "loss" in name.lower() and isinstance(value, torch.Tensor | float):
            yield f"the metric {name!r}", torch.as_tensor(value)
    for name, parameter in pl_module.named_parameters():
        yield f"the weight {name!r}", parameter
        if with_gradients and parameter.grad is not None and parameter.grad.layout == torch.strided:
            yield f"the gradient of {name!r}", parameter.grad


class Diagnosis(Hook):
    """Reports when training goes wrong: one ``diagnostic`` event when a fault begins, and one when it ends.

    At its cadence it reads the gradients that the update uses (averaged, unscaled, clipped), the size of the update,
    the losses of all steps since the last check, the times of the last few steps, and the batch. All ranks exchange
    their readings and reach the same verdict. Faults:

    - ``nonfinite_loss``, ``nonfinite_gradients``: with the first module that gave such a value, forward or backward, in
      the step of the check (with `trace_modules`, in any step). An update that a gradient scaler skips is not a fault.
    - ``vanishing_gradients``; ``exploding_gradients``: a norm above 10,000, or above 100 times the usual norm
    - ``dead_parameters``: parameters that had no gradient at three checks in a row
    - ``large_updates``, ``small_updates``: above 0.3 or below 1e-8 of the weights' norm
    - ``loss_spike``: 8 standard deviations above the median of the last 256 losses; the median absolute deviation
      estimates the standard deviation
    - ``zero_learning_rate``, ``rising_learning_rate`` (it rises after it fell)
    - ``latent_collapse``: the metric ``latent_std`` or ``z_std``, or the root of ``latent_var`` or ``z_var``, is below
      `latent_std_min`
    - ``straggler``: a rank that takes at least twice as long as the others, which wait for it; named with its host
    - ``repeated_data``: the same batch twice in a row, or on all ranks

    A fault has ended after two checks without it. An event has the figures in its ``artifacts``, and suggestions as
    text; the log says the same, loggers get ``diagnosis/<fault>``, 1 or 0, and callbacks receive ``on_fault``.

    Args:
        check_interval: Cadence in steps; 0 turns it off.
        gradient_min_norm: Gradients vanish if the largest norm of a parameter's gradient is below this.
        latent_std_min: Latent values have collapsed if their standard deviation is below this.
        trace_modules: Watch modules in every step instead of only at checks; costs a reduction for each module.
        scenario: Name of the scenario in the events.
        path: The telemetry file; None means ``WORLDFLUX_METRICS_PATH``, or ``.worldflux/metrics.jsonl``.

    Raises:
        ValueError: A number is invalid. The message lists every invalid one.
    """

    ranks: Literal["zero", "all"] = "all"
    writes = (FIGURES_FIELD,)
    _of_this_process = frozenset({"_probe", "_group"})
    _probe: Probe | None = None
    _group: dist.ProcessGroup | None = None

    def __init__(
        self,
        check_interval: int = 100,
        gradient_min_norm: float = 1e-8,
        latent_std_min: float = 1e-6,
        *,
        trace_modules: bool = False,
        scenario: str = "trainer",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        limits = {"gradient_min_norm": gradient_min_norm, "latent_std_min": latent_std_min}
        require(
            *((value >= 0, name, "a number >= 0", value) for name, value in limits.items()),
            (scenario != "", "scenario", "a non-empty string", scenario),
        )
        self.check_interval = step_cadence("check_interval", check_interval)
        self.trace_modules = trace_modules
        self._limits = limits
        self._history = History()
        self._events = RunEvents(scenario, path)

    @property
    def faults(self) -> dict[str, Fault]:
        """The faults that have begun and not ended, by kind; the same on all ranks."""
        return dict(self._history.active)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._train_began_at = time.monotonic()
        self._group = host_group() if trainer.world_size > 1 else None
        self.on_roll_back(trainer, pl_module)

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Discard the readings so far, and count from the step that is completed now."""
        self._close()
        self._step = trainer.global_step
        self._next_check = next_multiple(self._step, self.check_interval)
        if self.check_interval:
            most = min(self.check_interval, LOSSES_KEPT)
            self._probe = Probe(trainer, pl_module, most_losses=most, traces=self.trace_modules)
            self._watch_next(stride=1)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._probe is None:
            return
        step = trainer.global_step
        stride, self._step = max(1, step - self._step), step
        self._probe.note_loss(step, outputs)
        if step + TIMED_STEPS * stride < self._next_check:
            return
        is_due = step >= self._next_check
        if is_due or step + stride >= self._next_check:
            self._probe.note_batch(batch)
        try:
            if is_due:
                self._next_check = next_multiple(step, self.check_interval)
                self._check(trainer, outputs)
        finally:
            self._watch_next(stride)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": msgspec.to_builtins(self._history)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._history = msgspec.convert(state_dict["history"], History)

    def _watch_next(self, stride: int) -> None:
        """Watch the next step if the check is near; each step advances ``global_step`` by `stride`."""
        left = self._next_check - self._step
        if self._probe is not None and left <= TIMED_STEPS * stride:
            self._probe.watch_next(is_checked=left <= stride)

    def _close(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()

    def _check(self, trainer: pl.Trainer, outputs: Any) -> None:
        """Exchange the readings of all ranks, and judge them."""
        assert self._probe is not None
        read = functools.partial(self._probe.read, self._step, outputs)
        everyone = [(read(), None)] if trainer.world_size == 1 else gather_results(read, self._group)
        reading = Reading.of_ranks([reading_of_rank for reading_of_rank, _ in everyone if reading_of_rank is not None])
        if (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1) < trainer.world_size:
            # Tensor-parallel ranks get equal batches on purpose.
            reading = replace(reading, batches=reading.batches[:1])
        self.judge(trainer, reading)

    def judge(self, trainer: pl.Trainer, reading: Reading) -> None:
        """Report the faults that begin or end with a reading of all ranks."""
        changed = self._history.note_faults(find_faults(Case(reading, self._history, **self._limits)))
        self._history.add(reading)
        for fault in changed:
            self._report(trainer, fault)

    def _report(self, trainer: pl.Trainer, fault: Fault) -> None:
        """Report a fault that begins or ends to callbacks, loggers, the log and telemetry."""
        fire(trainer, "on_fault", fault)
        if not trainer.is_global_zero:
            return
        publish_figures(trainer, {f"diagnosis/{fault.kind}": 0.0 if fault.is_over else 1.0})
        if fault.is_over:
            log.info("%s is over at step %d; it began at step %d", fault.kind, trainer.global_step, fault.step)
        else:
            log.warning("step %d: %s. %s", fault.step, fault.text, " ".join(fault.suggestions))
        state = "ends" if fault.is_over else "begins"
        self._events.write(
            trainer,
            event="diagnostic",
            success=fault.is_over,
            duration_sec=time.monotonic() - self._train_began_at,
            error="" if fault.is_over else fault.text,
            suggestions=() if fault.is_over else fault.suggestions,
            artifacts={"fault": fault.kind, "state": state, "began_at_step": fault.step, **fault.figures},
        )
