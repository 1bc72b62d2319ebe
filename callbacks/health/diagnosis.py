"""Notices training that goes wrong, and says what it is, since when, and what to try."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from ...adapter.contract.exceptions import ReplicaDriftError
from ...adapter.plumbing.redaction import text_of
from ..hook.cadence import StepCadence, crossed, next_multiple
from ..hook.events import fire
from ..hook.figures import FIGURES_FIELD, publish_figures
from ..hook.hook import Hook
from ..telemetry.run_events import RunEvents
from .faults import LOSSES_KEPT, Fault, FaultLog, History, Limits
from .observation import LATENT_METRICS, Check, ModuleTrace, RankView, StepClock, UpdateWatch, fingerprint, loss_of
from .rules import find_faults

__all__ = ["Diagnosis"]

log = logging.getLogger(__name__)

TIMED_STEPS = 4
"""How many steps before a check are timed, and their batches looked at."""


class Diagnosis(Hook):
    """Tells when training goes wrong: one ``diagnostic`` event when a fault begins, and one when it ends.

    At its cadence it looks at the gradients right before the update uses them (averaged, unscaled, clipped), at what
    the update changes, at the losses of all steps since the last check, and at the time and the batches of the last
    steps. All ranks reach the same verdict, by one reduction a check. Faults:

    - ``nonfinite_loss``, ``nonfinite_gradients``: with the first module that gave such a value, forward or backward, in
      the step of the check (`trace_modules`: in any step). An update that a gradient scaler leaves out is not a fault.
    - ``vanishing_gradients``, ``exploding_gradients``, ``dead_parameters`` (no gradient for several checks)
    - ``large_updates``, ``small_updates``: norm of an update over that of the weights
    - ``loss_spike``: by median and median absolute deviation of the last 256 losses
    - ``zero_learning_rate``, ``rising_learning_rate`` (it rises after it fell)
    - ``latent_collapse``: the metric ``latent_std`` or ``z_std``, or the root of ``latent_var`` or ``z_var``
    - ``straggler``: a rank, by its host, for which the others wait
    - ``repeated_data``: the same batch twice in a row, or on all ranks
    - ``replica_drift``: what a `ReplicaGuard` has found

    An event has the figures in its ``artifacts``, and suggestions in words; the log says the same, loggers get
    ``diagnosis/<fault>``, 1 or 0, and callbacks hear ``on_fault``.

    Args:
        check_interval: Cadence in steps; 0 turns it off.
        gradient_min_norm: Gradients vanish where the largest norm of a parameter's gradient is below this.
        latent_std_min: Latent values have collapsed where their standard deviation is below this.
        gradient_max_norm: Gradients explode where a norm is above this, or above 100 times what is usual.
        update_ratio_min: Updates are too small below this share of the weights' norm.
        update_ratio_max: Updates are too large above this.
        spike_deviations: How many standard deviations above the median a loss is a spike.
        dead_checks: Checks without a gradient before a parameter counts as dead.
        straggler_factor: A rank this many times slower than the others is reported.
        cool_down_checks: After how many checks without it a fault has ended.
        trace_modules: Whether modules are watched in every step and not only in that of a check. It costs a reduction
            for each module.
        scenario: What the run does, as events say it.
        path: The telemetry file; None is ``WORLDFLUX_METRICS_PATH``, else ``.worldflux/metrics.jsonl``.

    Raises:
        ValueError: A number makes no sense; all that do are named.
    """

    ranks: Literal["zero", "all"] = "all"
    writes = (FIGURES_FIELD,)
    check_interval = StepCadence()
    _of_this_process = frozenset(
        {"_check", "_watch", "_clock", "_trace", "_losses", "_origins", "_fingerprints", "_failures"}
    )
    _check: Check | None = None

    def __init__(
        self,
        check_interval: int = 100,
        gradient_min_norm: float = 1e-8,
        latent_std_min: float = 1e-6,
        *,
        gradient_max_norm: float = 1e4,
        update_ratio_min: float = 1e-8,
        update_ratio_max: float = 0.3,
        spike_deviations: float = 8.0,
        dead_checks: int = 3,
        straggler_factor: float = 2.0,
        cool_down_checks: int = 2,
        trace_modules: bool = False,
        scenario: str = "trainer",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.limits = Limits(
            gradient_min_norm=gradient_min_norm,
            gradient_max_norm=gradient_max_norm,
            latent_std_min=latent_std_min,
            update_ratio_min=update_ratio_min,
            update_ratio_max=update_ratio_max,
            spike_deviations=spike_deviations,
            dead_checks=dead_checks,
            straggler_factor=straggler_factor,
        )
        _refuse(self.limits, check_interval, cool_down_checks, scenario)
        self.check_interval = check_interval
        self.trace_modules = trace_modules
        self.history = History()
        self.fault_log = FaultLog(cool_down_checks)
        self._events = RunEvents(scenario, path)
        self._began_at: dict[str, float] = {}
        self._train_began_at = time.monotonic()

    @property
    def faults(self) -> dict[str, Fault]:
        """The faults that have begun and not ended, by kind; the same on all ranks."""
        return dict(self.fault_log.active)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._detach()
        self._train_began_at = time.monotonic()
        self._last_check = self._step = trainer.global_step
        self._stride = 1
        most_losses = min(self.check_interval, LOSSES_KEPT)
        self._losses: deque[tuple[int, Any]] = deque(maxlen=most_losses)
        self._step_failures: list[Exception] = []
        self._origins: list[tuple[int, torch.Tensor]] = []
        self._fingerprints: list[list[torch.Tensor] | None] = []
        device = trainer.strategy.root_device
        parameters = dict(pl_module.named_parameters())
        self._watch = UpdateWatch(trainer.optimizers, parameters.items(), self._step_failures)
        first = next((parameters[name] for name in self._watch.names), None)
        self._clock = StepClock(self._watch.optimizers, first, device, self._step_failures)
        self._trace = ModuleTrace(pl_module, self._step_failures)
        self._check = Check(
            self._watch,
            self._clock,
            self._trace,
            has_names=_is_equal_on_all_ranks(trainer, len(self._watch.names), len(self._trace.names)),
            most_losses=most_losses,
            rank=trainer.global_rank,
            hosts=_hosts(trainer),
            device=device,
            shares_data=(trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1) < trainer.world_size,
        )
        if self.trace_modules and self.check_interval:
            self._trace.attach()
        self._prepare()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.check_interval or self._check is None:
            return
        step = trainer.fit_loop.epoch_loop.global_step  # what `trainer.global_step` returns, a call later
        loss = loss_of(outputs)
        if isinstance(loss, torch.Tensor):
            # A copy: what a trainer writes its next loss to would hold that one.
            self._losses.append((step, loss.detach().mean().clone()))
        elif isinstance(loss, int | float):
            self._losses.append((step, float(loss)))
        if self.trace_modules:
            self._origins.append((step, self._trace.origins(trainer.strategy.root_device)))
        if self._is_near:
            self._fingerprints = [*self._fingerprints[-1:], fingerprint(batch)]
        self._stride = max(1, step - self._step)
        self._step = step
        if crossed(self._last_check, step, self.check_interval):
            self._look(trainer, pl_module, outputs, step)
        if not self._is_due:
            self._prepare()

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_start(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._detach()

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._detach()
        if isinstance(exception, ReplicaDriftError):
            text = text_of(exception)
            drift = Fault("replica_drift", text, ("See the cause that the error names.",), {}, trainer.global_step)
            self._tell(trainer, pl_module, drift)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history.state_dict(), "faults": self.fault_log.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state_dict(state_dict["history"])
        self.fault_log.load_state_dict(state_dict["faults"])

    _is_near = False
    """Whether the steps before a check have begun."""
    _is_due = False
    """Whether the next step is that of a check."""

    def _prepare(self) -> None:
        """Begin to look, where the next check is near."""
        if not self.check_interval:
            return
        left = next_multiple(self._step, self.check_interval) - self._step
        if not self._is_near and left <= TIMED_STEPS * self._stride:
            self._is_near = True
            self._clock.attach()
        if not self._is_due and left <= self._stride:
            self._is_due = True
            self._watch.attach()
            self._trace.attach()

    def _detach(self) -> None:
        self._is_near = self._is_due = False
        if self._check is not None:
            self._clock.detach()
            self._watch.detach()
            self._trace.detach()

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, step: int) -> None:
        assert self._check is not None
        failure: Exception | None = None
        view = RankView(self._last_check, step, list(self._losses), self._origins, self._fingerprints, None)
        try:
            if self._step_failures:
                raise self._step_failures[0]
            view.latent = _latent(trainer, outputs)
            if not self.trace_modules:
                view.origins = [(step, self._trace.origins(trainer.strategy.root_device))]
            vector = self._check.vector(view)
        except Exception as error:  # noqa: BLE001  # raised below: the other ranks wait in the reduction
            failure, vector = error, self._check.unknown()
        reduced = trainer.strategy.reduce(vector, reduce_op="max") if trainer.world_size > 1 else vector
        self._losses.clear()
        self._step_failures.clear()
        self._origins, self._last_check = [], step
        self._start_over()
        if failure is not None:
            raise failure
        reading = self._check.reading(reduced, view)
        changed = self.fault_log.update(find_faults(reading, self.history, self.limits), step)
        self.history.add(reading)
        for fault in changed:
            self._tell(trainer, pl_module, fault)

    def _start_over(self) -> None:
        is_traced = self.trace_modules
        self._is_near = self._is_due = False
        self._clock.detach()
        self._watch.detach()
        if not is_traced:
            self._trace.detach()

    def _tell(self, trainer: pl.Trainer, pl_module: pl.LightningModule, fault: Fault) -> None:
        fire(trainer, "on_fault", fault)
        if not trainer.is_global_zero:
            return
        now = time.monotonic()
        began_at = self._began_at.pop(fault.kind, self._train_began_at)
        if not fault.is_over:
            self._began_at[fault.kind] = now
        publish_figures(trainer, lambda: {f"diagnosis/{fault.kind}": 0.0 if fault.is_over else 1.0})
        if fault.is_over:
            log.info("%s is over at step %d; it began at step %d", fault.kind, trainer.global_step, fault.step)
        else:
            log.warning("step %d: %s. %s", fault.step, fault.text, " ".join(fault.suggestions))
        self._events.write(
            trainer,
            event="diagnostic",
            success=fault.is_over,
            duration_sec=now - (began_at if fault.is_over else self._train_began_at),
            error="" if fault.is_over else fault.text,
            suggestions=() if fault.is_over else fault.suggestions,
            artifacts={
                "fault": fault.kind,
                "state": "ends" if fault.is_over else "begins",
                "began_at_step": fault.step,
                **fault.figures,
            },
        )


def _refuse(limits: Limits, check_interval: int, cool_down_checks: int, scenario: str) -> None:
    counts = {"dead_checks": limits.dead_checks, "cool_down_checks": cool_down_checks}
    wrong = [f"`{name}` {value} (expected at least 1)" for name, value in counts.items() if value < 1]
    for name in (each.name for each in fields(limits)):
        value = getattr(limits, name)
        if name not in counts and not value >= 0:
            wrong.append(f"`{name}` {value} (expected a number >= 0)")
    if check_interval < 0:
        wrong.append(f"`check_interval` {check_interval} (expected a number >= 0)")
    if not scenario:
        wrong.append("`scenario` '' (expected a non-empty string)")
    if wrong:
        raise ValueError(f"Invalid arguments of Diagnosis: {', '.join(wrong)}.")


def _latent(trainer: pl.Trainer, outputs: Any) -> tuple[str, Any] | None:
    """The first metric of `LATENT_METRICS` of this step, whatever stands before a slash in its name."""
    given = (
        {name: value for name, value in outputs.items() if isinstance(name, str)}
        if isinstance(outputs, Mapping)
        else {}
    )
    metrics = {**trainer.callback_metrics, **given}
    by_name = {name.rpartition("/")[2]: name for name in metrics}
    found = next((by_name[name] for name in LATENT_METRICS if name in by_name), None)
    return None if found is None else (found, metrics[found])


def _is_equal_on_all_ranks(trainer: pl.Trainer, *numbers: int) -> bool:
    """Whether all ranks have the same numbers."""
    if trainer.world_size == 1:
        return True
    both_ways = [float(sign * number) for number in numbers for sign in (1, -1)]
    vector = torch.tensor(both_ways, dtype=torch.float64, device=trainer.strategy.root_device)
    return bool((trainer.strategy.reduce(vector.clone(), reduce_op="max") == vector).all().item())


def _hosts(trainer: pl.Trainer) -> list[str]:
    """The host of each rank."""
    hosts: list[Any] = [platform.node()]
    if trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
        hosts = [None] * trainer.world_size
        dist.all_gather_object(hosts, platform.node())
    return hosts
