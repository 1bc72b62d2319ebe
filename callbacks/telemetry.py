"""Reports of a run at a cadence: its speed and cost (`Heartbeat`), its machine (`SystemMonitor`), its time (`Goodput`).

`RunEvents` writes the telemetry events of a run.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from ..adapter.contract.exceptions import EventLogError
from ..adapter.plumbing.devices import memory_in_use
from ..adapter.plumbing.text import require
from ..reporters.events.goodput import METRIC_PREFIX
from ..reporters.telemetry import write_event
from .hook.cadence import NEVER, Pace, crossed, positive, step_cadence
from .hook.events import FIGURES_FIELD, data_wait_s, publish_figures, run_id_of
from .hook.hook import Hook, skippable
from .stop.sources import process_age_s

log = logging.getLogger(__name__)

_Figures = TypeVar("_Figures")


class RunEvents:
    """Writes telemetry events of one scenario; warns when the first one cannot be written.

    Args:
        scenario: Name of the scenario.
        path: The file; None means `reporters.telemetry.telemetry_path`.
    """

    def __init__(self, scenario: str, path: str | os.PathLike[str] | None) -> None:
        self.scenario = scenario
        self.path = path
        self._has_warned = False

    def write(self, trainer: pl.Trainer, **fields: Any) -> None:
        """Write one event; see `reporters.telemetry.write_event` for the fields."""
        step, epoch = trainer.global_step, trainer.current_epoch
        try:
            write_event(
                scenario=self.scenario, run_id=run_id_of(trainer), step=step, epoch=epoch, path=self.path, **fields
            )
        except EventLogError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("telemetry is not written, and training continues without it: %s", error)


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products, convolutions and attention by the formulas of torch's own counter.

    Unlike `torch.utils.flop_counter.FlopCounterMode`, it puts no hooks on modules and gradients: `adapter/gradients`
    replaces or refuses some of them. A formula that fails ends only the count, not the step.
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
            except Exception as error:  # noqa: BLE001  # torch's formulas may fail on unusual arguments
                self.flops = None
                log.warning("the operations of a step cannot be counted: %s: %s", type(error).__name__, error)
        return out


class _Mark(NamedTuple):
    """A moment of training, from which speed is measured."""

    at: float
    """Its time, on the clock of ``time.monotonic``."""
    step: int
    batches: int


class Heartbeat(Hook):
    """Writes a ``heartbeat`` event of WASR telemetry at a cadence, and sends its figures to every logger.

    Speed is measured since the last heartbeat and over this attempt. A roll-back starts both measurements again.
    ``artifacts`` of the event, and loggers as ``perf/…``, get these figures:

    - ``steps_per_sec`` since the last heartbeat, and ``attempt_steps_per_sec`` since training began in this attempt
    - ``flops_per_sec`` of this device: the operations of a step, by the formulas of ``torch.utils.flop_counter``. They
      are counted in the second step, and again after a heartbeat at which batches have other shapes
    - ``tokens_per_sec`` of all ranks, if steps report the metric ``tokens``: the tokens of their batch on this rank
    - ``mfu``: ``flops_per_sec`` as a share of `peak_flops`
    - ``watts`` of an NVIDIA GPU by NVML (needs ``nvidia-ml-py``)
    - ``memory_bytes`` and ``peak_memory_bytes``: of the GPU by torch, or of this process

    If ``flops_per_sec`` cannot be measured, it is the metric ``flops_estimate`` or ``flops`` (operations per second).
    For ``watts`` it is ``watts_estimate`` or ``power_watts``. Without such a metric, the figure is null.
    ``duration_sec`` is the time since training began in this attempt, ``ttfi_sec`` the time from the set-up of the fit
    to the end of its first step. A roll-back also starts ``duration_sec`` again.

    Args:
        interval_steps: Cadence in steps; 0 turns it off.
        scenario: Name of the scenario in the events.
        path: The telemetry file; None means ``WORLDFLUX_METRICS_PATH``, or ``.worldflux/metrics.jsonl``.
        count_flops: Whether to count floating point operations.
        peak_flops: Operations per second that one device can do, such as 989e12 for an H100 in bf16. With it, ``mfu``
            is the share of them that the training uses, from 0 to 1.

    Raises:
        ValueError: `interval_steps` is negative, `scenario` is empty, or `peak_flops` is not positive.
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
        peak_flops: float | None = None,
    ) -> None:
        self.peak_flops = None if peak_flops is None else positive("peak_flops", peak_flops)
        require((scenario != "", "scenario", "a non-empty string", scenario))
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
        """Operations of a step whose batch has the shapes in `_shapes`; None while that is not known."""
        self._shapes: list[object] = []
        self._counts_next = self.count_flops and self.interval_steps > 0
        self._batches = 0
        self.on_roll_back(trainer, pl_module)

    @override
    def on_roll_back(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The two figures of speed start again: otherwise a step that was undone and repeated would count twice.
        self._window = self._attempt = _Mark(time.monotonic(), trainer.global_step, self._batches)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._counts_next and self._batches:  # the first step may do work that later steps do not
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
            self._flops = counter.flops or None  # 0 means that torch knows no formula for its operations
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
        """Write and publish the figures since the last heartbeat."""
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
        tokens = _metric(trainer, "tokens", "train/tokens")
        figures = {
            "steps_per_sec": steps_per_sec,
            "tokens_per_sec": None if tokens is None else tokens * steps_per_sec * trainer.world_size,
            "mfu": None if flops is None or self.peak_flops is None else flops / self.peak_flops,
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
    """Return the shapes of the tensors and arrays of a batch, and the row counts of Arrow batches."""
    return [getattr(leaf, "shape", getattr(leaf, "num_rows", None)) for leaf in tree_leaves(batch)]


def _metric(trainer: pl.Trainer, *names: str) -> float | None:
    """Return the value of the first of `names` that the step has reported, also if it is 0."""
    metrics = trainer.callback_metrics
    return next((float(metrics[name]) for name in names if name in metrics), None)


def _memory(device: torch.device) -> dict[str, float | None]:
    """Return bytes in use and their peak: of the device if it counts them, otherwise of the process."""
    if (counted := memory_in_use(device)) is not None:
        used, peak = counted
    else:
        used = psutil.Process().memory_info().rss
        # Linux counts the peak in KiB, and a little late.
        peak = max(used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"memory_bytes": used, "peak_memory_bytes": peak}


class SystemMonitor(Hook):
    """Sends the load of rank zero's machine to every logger as ``system/…``.

    - ``cpu_percent`` of all processors together, ``memory_percent`` and ``memory_used_bytes`` of the machine, and
      ``disk_free_bytes`` of the file system of ``default_root_dir``.
    - ``process_cpu_percent`` (100 is one processor) and ``process_memory_bytes`` (resident) of this process.
    - For each GPU that ranks on this machine use, by NVML: ``gpu0_utilization_percent``, ``gpu0_memory_used_bytes``,
      ``gpu0_power_watts``, ``gpu0_temperature_celsius``. Requires ``nvidia-ml-py`` (``pip install nvidia-ml-py``).

    Args:
        every_s: Seconds between two readings. A run that is shorter than this reports nothing.

    Raises:
        ValueError: `every_s` is not positive.
    """

    writes = (FIGURES_FIELD,)
    _of_this_process = frozenset({"_process"})
    _process: psutil.Process | None = None
    """This process, with the time of the last reading of its load."""
    _gpus: Sequence[int] = ()

    def __init__(self, every_s: float = 10.0) -> None:
        self.every_s = positive("every_s", every_s)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        self._gpus = _gpus_of_this_machine(trainer, device) if device.type == "cuda" else ()
        self._pace = Pace(self.every_s)
        self._next_at = time.monotonic() + self.every_s
        psutil.cpu_percent()  # the share since the last call: this one begins the first interval
        self._process = psutil.Process()
        self._process.cpu_percent()

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.next_due_step = self._pace.next_look(trainer.global_step)
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self.every_s
            figures = self._read(trainer.default_root_dir)
            publish_figures(trainer, {f"system/{name}": float(value) for name, value in figures.items()})

    def _read(self, directory: str) -> dict[str, float]:
        """Return the load of the machine, this process and its GPUs."""
        memory = psutil.virtual_memory()
        process = self._process = self._process or psutil.Process()
        figures: dict[str, float] = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_percent": memory.percent,
            "memory_used_bytes": memory.used,
            "process_cpu_percent": process.cpu_percent(),
            "process_memory_bytes": process.memory_info().rss,
            # The folder does not exist before the run has written something into it.
            "disk_free_bytes": psutil.disk_usage(directory if os.path.exists(directory) else os.curdir).free,
        }
        for gpu in self._gpus:
            load = read_nvml(functools.partial(_load_of, gpu), f"the load of GPU {gpu}")
            self._gpus = [other for other in self._gpus if other != gpu or load is not None]
            figures |= load or {}
        return figures


def _load_of(gpu: int) -> dict[str, float]:
    return {
        f"gpu{gpu}_utilization_percent": torch.cuda.utilization(gpu),
        f"gpu{gpu}_memory_used_bytes": torch.cuda.device_memory_used(gpu),
        f"gpu{gpu}_power_watts": torch.cuda.power_draw(gpu) / 1000,
        f"gpu{gpu}_temperature_celsius": torch.cuda.temperature(gpu),
    }


def read_nvml(read: Callable[[], _Figures], what: str) -> _Figures | None:
    """Return the result of `read`, a query of NVML. If it fails, log that and return None: the caller stops trying."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # NVML's own errors, whose class only that package has
        log.info("%s is unknown: %s (`pip install nvidia-ml-py` installs the package that reads it)", what, error)
        return None


def _gpus_of_this_machine(trainer: pl.Trainer, device: torch.device) -> tuple[int, ...]:
    """Return the GPUs of all ranks on this machine if this process can see them, otherwise only its own GPU."""
    count = torch.cuda.device_count()
    own = device.index or 0
    return tuple(range(trainer.num_devices)) if own < trainer.num_devices <= count else (own,)


class Goodput(Hook):
    """Sends the seconds that an attempt has spent so far to every logger, as ``time/…``, at most every `every_s`.

    ``time/start_up`` is the time before the first step, ``time/data_wait`` the wait for data, ``time/checkpoint``,
    ``time/samples``, ``time/evaluation`` and ``time/rollout`` how long these delayed training, ``time/lost`` the time
    of steps that a roll-back has undone, and ``time/steps`` the rest. ``genlight events RUN --goodput`` adds up all
    attempts of a run.

    Time is measured when such a delay begins and ends, so that a step itself costs nothing.

    Args:
        every_s: Seconds between two reports; shorter runs report nothing. The last step reports as well.

    Raises:
        ValueError: `every_s` is not positive.
    """

    optional_reads = ("eval_scores",)  # so it runs after an evaluation, and its report includes that
    writes = (FIGURES_FIELD,)

    def __init__(self, every_s: float = 10.0) -> None:
        self.every_s = positive("every_s", every_s)
        self._spent: dict[str, float] = {}
        self._validates_since = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began_at = time.monotonic()
        self._next_at = self._began_at + self.every_s
        self._has_reported = False
        self._start_up_s = process_age_s()
        self._waited_s = data_wait_s(trainer)
        self._spent = {}
        self._pace = Pace(self.every_s)
        self.next_due_step = 0

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, step = time.monotonic(), trainer.global_step
        is_last = trainer.should_stop or step == trainer.max_steps
        if now >= self._next_at or (is_last and self._has_reported):
            self._has_reported = True
            self._next_at = now + self.every_s
            publish_figures(trainer, self._seconds(trainer, now))
        self.next_due_step = self._pace.next_look(step)
        if trainer.max_steps > step:
            self.next_due_step = min(self.next_due_step, trainer.max_steps)

    def _seconds(self, trainer: pl.Trainer, now: float) -> dict[str, float]:
        """Return the seconds that this attempt has spent until `now`, by the names of the metrics."""
        spent = dict(self._spent)
        if self._waited_s is not None:
            spent["data_wait"] = (data_wait_s(trainer) or 0.0) - self._waited_s
        spent["steps"] = max(now - self._began_at - sum(spent.values()), 0.0)
        spent["start_up"] = self._start_up_s
        return {METRIC_PREFIX + what: round(spent_s, 3) for what, spent_s in spent.items()}

    @override
    def on_time_spent(self, trainer: pl.Trainer, pl_module: pl.LightningModule, what: str, seconds: float) -> None:
        self._spent[what] = self._spent.get(what, 0.0) + seconds

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validates_since = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_time_spent(trainer, pl_module, "evaluation", time.monotonic() - self._validates_since)
