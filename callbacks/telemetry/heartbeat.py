"""Says at a cadence how fast training goes and what it costs."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ...adapter.plumbing.devices import memory_of
from ..hook.cadence import NEVER, crossed, step_cadence
from ..hook.events import FIGURES_FIELD, publish_figures
from ..hook.hook import Hook, skippable
from .flops import StepFlops
from .run_events import RunEvents
from .system_monitor import read_nvml

__all__ = ["Heartbeat"]


@dataclass
class _Counts:
    """The training done in a span of time."""

    began_at: float
    """On the clock of ``time.monotonic``."""
    step: int
    """Completed steps when it began."""
    batches: int = 0

    def steps_per_sec(self, step: int, now: float) -> float:
        return (step - self.step) / max(now - self.began_at, 1e-9)


class Heartbeat(Hook):
    """Writes a ``heartbeat`` event of WASR telemetry at a cadence, and sends its figures to every logger.

    Throughput is measured since the last heartbeat and over this attempt, without steps before a resume. Fields without
    a key of their own go in ``artifacts`` of the event, and to loggers as ``perf/…``:

    - ``steps_per_sec``, and that of the attempt (``attempt_steps_per_sec``)
    - ``flops_per_sec`` of this device: the operations of a step, counted by the formulas of
      ``torch.utils.flop_counter`` in the second step and again in a step after batches changed their shapes, as seen
      at a heartbeat
    - ``watts`` of an NVIDIA GPU by NVML (needs ``nvidia-ml-py``)
    - ``memory_bytes`` and ``peak_memory_bytes``: of the GPU by torch, else of this process

    Lightning's ``ThroughputMonitor`` has samples and tokens a second, and their share of what the device can do.

    What cannot be measured is taken from the metrics ``flops_estimate`` or ``flops``, operations a second, and
    ``watts_estimate`` or ``power_watts``; else it is null. ``duration_sec`` is the time since training began,
    ``ttfi_sec`` that from the set-up of the fit to the end of its first step.

    Args:
        interval_steps: Cadence in steps; 0 turns it off.
        scenario: Name of the scenario in the events.
        path: The telemetry file; None is ``WORLDFLUX_METRICS_PATH``, else ``.worldflux/metrics.jsonl``.
        count_flops: Whether to count floating point operations.

    Raises:
        ValueError: `interval_steps` is negative, or `scenario` is empty.
    """

    writes = (FIGURES_FIELD,)
    _of_this_process = frozenset({"_flops"})
    _has_nvml = False
    _flops: StepFlops | None = None

    def __init__(
        self,
        interval_steps: int = 100,
        scenario: str = "trainer",
        *,
        path: str | os.PathLike[str] | None = None,
        count_flops: bool = True,
    ) -> None:
        if not scenario:
            raise ValueError("Invalid `scenario`. Expected a non-empty string, but received ''.")
        self.interval_steps = step_cadence("interval_steps", interval_steps)
        self.count_flops = count_flops
        self.events = RunEvents(scenario, path)
        self._set_up_at = time.monotonic()
        self._first_step_s: float | None = None
        self._window = self._attempt = _Counts(self._set_up_at, 0)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._set_up_at = time.monotonic()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step_s = None
        self._attempt = _Counts(time.monotonic(), trainer.global_step)
        self._window = _Counts(self._attempt.began_at, self._attempt.step)
        self._has_nvml = trainer.strategy.root_device.type == "cuda"
        self._flops = StepFlops() if self.count_flops else None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The second step: the first one may do what later ones do not.
        if self._flops is not None and self._flops.is_wanted and self._attempt.batches and self.interval_steps:
            self._flops.begin(batch)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.interval_steps:
            self.next_due_step = NEVER
            return
        if self._flops is not None:
            self._flops.end()
        self._window.batches += 1
        self._attempt.batches += 1
        if self._first_step_s is None:
            self._first_step_s = time.monotonic() - self._set_up_at
        step = trainer.global_step
        if crossed(self._window.step, step, self.interval_steps):
            if self._flops is not None:
                self._flops.look_at(batch)
            self._beat(trainer)

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Of the attempt, too: what was undone is not progress, and would count twice.
        self._attempt = _Counts(time.monotonic(), trainer.global_step)
        self._window = _Counts(self._attempt.began_at, self._attempt.step)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._abandon_count()

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._abandon_count()

    def _abandon_count(self) -> None:
        if self._flops is not None:
            self._flops.end(failed=True)

    def _beat(self, trainer: pl.Trainer) -> None:
        now, step = time.monotonic(), trainer.global_step
        window, attempt = self._window, self._attempt
        self._window = _Counts(now, step)
        steps_per_sec = window.steps_per_sec(step, now)
        flops = self._flops_per_sec(trainer, window.batches / max(now - window.began_at, 1e-9))
        watts = self._watts(trainer.strategy.root_device)
        if watts is None:
            watts = _metric(trainer, "watts_estimate", "power_watts")
        figures = {
            "steps_per_sec": steps_per_sec,
            "attempt_steps_per_sec": attempt.steps_per_sec(step, now),
            "flops_per_sec": flops,
            "watts": watts,
            **_memory(trainer.strategy.root_device),
        }
        self.events.write(
            trainer,
            event="heartbeat",
            success=True,
            duration_sec=now - attempt.began_at,
            ttfi_sec=self._first_step_s,
            throughput_steps_per_sec=steps_per_sec,
            flops_estimate=flops,
            watts_estimate=watts,
            flops_per_watt=flops / watts if flops is not None and watts else None,
            artifacts=figures,
        )
        sent = {f"perf/{name}": value for name, value in figures.items() if value is not None}
        publish_figures(trainer, sent)

    def _watts(self, device: torch.device) -> float | None:
        """The mean over NVML's last second at most; None where nothing says it, which is not asked again."""
        if not self._has_nvml:
            return None
        watts = read_nvml(lambda: torch.cuda.power_draw(device) / 1000, "the power of the GPU")
        self._has_nvml = watts is not None
        return watts

    def _flops_per_sec(self, trainer: pl.Trainer, batches_per_sec: float) -> float | None:
        per_step = None if self._flops is None else self._flops.per_step
        return _metric(trainer, "flops_estimate", "flops") if per_step is None else per_step * batches_per_sec


def _metric(trainer: pl.Trainer, *names: str) -> float | None:
    """The first metric of the step that has one of the names; a 0 counts."""
    metrics = trainer.callback_metrics
    return next((float(metrics[name]) for name in names if name in metrics), None)


def _memory(device: torch.device) -> dict[str, float | None]:
    of_device = memory_of(device)
    if of_device is not None:
        return {"memory_bytes": of_device[0], "peak_memory_bytes": of_device[1]}
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Linux counts the peak in KiB, and a little late.
    peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"memory_bytes": resident, "peak_memory_bytes": peak}
