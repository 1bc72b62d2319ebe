"""Report the speed and the cost of training at a cadence."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from ..hook.cadence import NEVER, crossed, step_cadence
from ..hook.events import FIGURES_FIELD, publish_figures
from ..hook.hook import Hook, skippable
from .run_events import RunEvents
from .system_monitor import read_nvml

log = logging.getLogger(__name__)


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products, convolutions and attention by the formulas of torch's own counter.

    Unlike `torch.utils.flop_counter.FlopCounterMode` it puts no hooks on modules and gradients, because other parts of
    the run may translate or forbid them, and a formula that fails ends the count and not the step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int | None = 0
        """None once a formula has failed."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None and self.flops is not None:
            try:
                self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
            except Exception as error:  # noqa: BLE001  # whatever a formula of torch does not foresee
                self.flops = None
                log.warning("the operations of a step cannot be counted: %s: %s", type(error).__name__, error)
        return out


class _Mark(NamedTuple):
    """A moment of training."""

    at: float
    """Start of the window, on the clock of ``time.monotonic``."""
    step: int
    batches: int


class Heartbeat(Hook):
    """Writes a ``heartbeat`` event of WASR telemetry at a cadence, and sends its figures to every logger.

    Throughput is measured since the last heartbeat and over this attempt, without steps before a resume. Further
    figures go into ``artifacts`` of the event, and to loggers as ``perf/…``:

    - ``steps_per_sec``, and the same over the attempt (``attempt_steps_per_sec``)
    - ``flops_per_sec`` of this device: the operations of a step, counted by the formulas of
      ``torch.utils.flop_counter`` in the second step and again in a step after batches changed their shapes, as seen
      at a heartbeat
    - ``watts`` of an NVIDIA GPU by NVML (needs ``nvidia-ml-py``)
    - ``memory_bytes`` and ``peak_memory_bytes``: of the GPU by torch, or of this process

    Lightning's ``ThroughputMonitor`` reports samples and tokens a second, and utilization of the device.

    Figures that cannot be measured are taken from the metrics ``flops_estimate`` or ``flops``, operations a second, and
    ``watts_estimate`` or ``power_watts``; otherwise they are null. ``duration_sec`` is the time since training began,
    ``ttfi_sec`` the time from the set-up of the fit to the end of its first step.

    Args:
        interval_steps: Cadence in steps; 0 turns it off.
        scenario: Name of the scenario in the events.
        path: The telemetry file; None means ``WORLDFLUX_METRICS_PATH``, or ``.worldflux/metrics.jsonl``.
        count_flops: Whether to count floating point operations.

    Raises:
        ValueError: `interval_steps` is negative, or `scenario` is empty.
    """

    writes = (FIGURES_FIELD,)
    _of_this_process = frozenset({"_counter"})
    _counter: _FlopCounter | None = None

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

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._set_up_at = time.monotonic()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step_s: float | None = None
        self._has_nvml = trainer.strategy.root_device.type == "cuda"
        self._flops: int | None = None
        """Operations of a step whose batch has the shapes below; None while that is not known."""
        self._shapes: list[object] = []
        self._counts_next = self.count_flops and self.interval_steps > 0
        self._batches = 0
        self.on_roll_back(trainer, pl_module)

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The attempt's window too: undone steps are not progress, and would count twice.
        self._window = self._attempt = _Mark(time.monotonic(), trainer.global_step, self._batches)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._counts_next and self._batches:  # the first step may do what later ones do not
            self._counts_next = False
            self._shapes = _shapes_of(batch)
            self._counter = _FlopCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.interval_steps:
            self.next_due_step = NEVER
            return
        counter = self._end_count()
        if counter is not None:
            self._flops = counter.flops or None  # a trainer that does nothing that torch counts may do anything else
        self._batches += 1
        if self._first_step_s is None:
            self._first_step_s = time.monotonic() - self._set_up_at
        if crossed(self._window.step, trainer.global_step, self.interval_steps):
            if self.count_flops and self._shapes != _shapes_of(batch):
                self._counts_next = True
            self._beat(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_count()

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_count()

    def _end_count(self) -> _FlopCounter | None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return counter

    def _beat(self, trainer: pl.Trainer) -> None:
        window, attempt, now = self._window, self._attempt, _Mark(time.monotonic(), trainer.global_step, self._batches)
        self._window = now
        seconds, device = max(now.at - window.at, 1e-9), trainer.strategy.root_device
        steps_per_sec = (now.step - window.step) / seconds
        flops = None if self._flops is None else self._flops * (now.batches - window.batches) / seconds
        flops = _metric(trainer, "flops_estimate", "flops") if flops is None else flops
        watts = None
        if self._has_nvml:
            watts = read_nvml(lambda: torch.cuda.power_draw(device) / 1000, "the power of the GPU")
            self._has_nvml = watts is not None
        watts = _metric(trainer, "watts_estimate", "power_watts") if watts is None else watts
        figures = {
            "steps_per_sec": steps_per_sec,
            "attempt_steps_per_sec": (now.step - attempt.step) / max(now.at - attempt.at, 1e-9),
            "flops_per_sec": flops,
            "watts": watts,
            **_memory(device),
        }
        self.events.write(
            trainer,
            event="heartbeat",
            success=True,
            duration_sec=now.at - attempt.at,
            ttfi_sec=self._first_step_s,
            throughput_steps_per_sec=steps_per_sec,
            flops_estimate=flops,
            watts_estimate=watts,
            flops_per_watt=flops / watts if flops is not None and watts else None,
            artifacts=figures,
        )
        publish_figures(trainer, {f"perf/{name}": value for name, value in figures.items() if value is not None})


def _shapes_of(batch: Any) -> list[object]:
    """The shapes of the tensors and arrays of a batch; the row counts of Arrow batches."""
    return [getattr(leaf, "shape", getattr(leaf, "num_rows", None)) for leaf in tree_leaves(batch)]


def _metric(trainer: pl.Trainer, *names: str) -> float | None:
    """The first metric of the step that has one of the names; a 0 counts."""
    metrics = trainer.callback_metrics
    return next((float(metrics[name]) for name in names if name in metrics), None)


def _memory(device: torch.device) -> dict[str, float | None]:
    """Return bytes in use and their peak: of the device if it counts them, otherwise of the process."""
    module: Any = torch.get_device_module(device)
    if device.type != "cpu" and hasattr(module, "max_memory_allocated"):
        used, peak = int(module.memory_allocated(device)), int(module.max_memory_allocated(device))
    else:
        used = psutil.Process().memory_info().rss
        # Linux counts the peak in KiB, and a little late.
        peak = max(used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"memory_bytes": used, "peak_memory_bytes": peak}
