"""Reports at an interval how busy the machine is that trains."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import psutil
import torch
from typing_extensions import override

from ..hook.cadence import Pace
from ..hook.events import FIGURES_FIELD, publish_figures
from ..hook.hook import Hook, skippable

log = logging.getLogger(__name__)

_Figures = TypeVar("_Figures")


class SystemMonitor(Hook):
    """Sends the load of rank zero's machine to every logger as ``system/…``.

    - ``cpu_percent`` of all processors together, ``memory_percent`` and ``memory_used_bytes`` of the machine, and
      ``disk_free_bytes`` of the file system of ``default_root_dir``.
    - ``process_cpu_percent`` (100 is one processor) and ``process_memory_bytes`` (resident) of this process.
    - For each GPU that ranks on this machine use, by NVML: ``gpu0_utilization_percent``, ``gpu0_memory_used_bytes``,
      ``gpu0_power_watts``, ``gpu0_temperature_celsius``. Requires ``nvidia-ml-py`` (``pip install nvidia-ml-py``).

    Args:
        every_s: Seconds between two readings. Shorter runs report nothing.

    Raises:
        ValueError: `every_s` is not positive.
    """

    writes = (FIGURES_FIELD,)
    _of_this_process = frozenset({"_process"})
    _process: psutil.Process | None = None
    """This process, with the time of the last reading of its load."""
    _gpus: Sequence[int] = ()

    def __init__(self, every_s: float = 10.0) -> None:
        if not 0 < every_s < math.inf:
            raise ValueError(f"Invalid `every_s`. Expected a positive number of seconds, but received {every_s!r}.")
        self.every_s = every_s

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
        memory = psutil.virtual_memory()
        process = self._process = self._process or psutil.Process()
        figures: dict[str, float] = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_percent": memory.percent,
            "memory_used_bytes": memory.used,
            "process_cpu_percent": process.cpu_percent(),
            "process_memory_bytes": process.memory_info().rss,
            # A run may have written nothing yet.
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
    """Return the result of `read`, a query of NVML; None after logging that it fails, so that it is not repeated."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # NVML's own errors, whose class only that package has
        log.info("%s is unknown: %s (`pip install nvidia-ml-py` installs the package that reads it)", what, error)
        return None


def _gpus_of_this_machine(trainer: pl.Trainer, device: torch.device) -> tuple[int, ...]:
    """Return the devices of the ranks on this machine, if this process can see them, otherwise its own."""
    count = torch.cuda.device_count()
    own = device.index or 0
    return tuple(range(trainer.num_devices)) if own < trainer.num_devices <= count else (own,)
