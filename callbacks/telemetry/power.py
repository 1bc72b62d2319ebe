"""The power that a device draws: of an NVIDIA GPU by NVML, else of the processor by RAPL where it may be read."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

__all__ = ["RAPL", "PowerMeter"]

log = logging.getLogger(__name__)

RAPL = Path("/sys/class/powercap")
"""Where Linux shows the counters of energy; files are described in its ``Documentation/power/powercap``."""


class PowerMeter:
    """Reads the power of what trains.

    NVML gives the mean over up to its last second. RAPL counts energy, so that its power is the mean since the last
    reading; it is that of all processor packages of the machine, whichever process uses them.

    Args:
        device: What trains.
        rapl: The folder of the counters.
    """

    def __init__(self, device: torch.device, *, rapl: Path = RAPL) -> None:
        self._device = device
        self._has_nvml = device.type == "cuda"
        self._packages = [] if self._has_nvml else _packages(rapl)
        self._read: tuple[float, list[int]] | None = None
        self.watts()

    def watts(self) -> float | None:
        """Watts; None where nothing tells, and from RAPL at the first reading."""
        if self._has_nvml:
            return self._nvml_watts()
        before, self._read = self._read, self._energies()
        if before is None or self._read is None:
            return None
        seconds = self._read[0] - before[0]
        used_uj = sum(
            (now - then) % (limit + 1)  # the counter begins anew after its limit
            for (_, limit), then, now in zip(self._packages, before[1], self._read[1], strict=True)
        )
        return used_uj / 1e6 / seconds if seconds > 0 else None

    def _nvml_watts(self) -> float | None:
        try:
            return torch.cuda.power_draw(self._device) / 1000
        except ModuleNotFoundError:
            log.info("the power of the GPU is unknown: pip install nvidia-ml-py")
        except Exception as error:  # noqa: BLE001  # NVML's own errors, whose class only that package has
            log.info("the power of the GPU is unknown: %s", error)
        self._has_nvml = False
        return None

    def _energies(self) -> tuple[float, list[int]] | None:
        if not self._packages:
            return None
        try:
            return time.monotonic(), [_number(package / "energy_uj") for package, _ in self._packages]
        except (OSError, ValueError) as error:
            log.info("the power of the processor is unknown: %s", error)
            self._packages = []
            return None


def _packages(rapl: Path) -> list[tuple[Path, int]]:
    """The packages whose counters may be read, with the largest value of each; parts of a package are left out."""
    found = []
    for package in sorted(rapl.glob("intel-rapl:*")):
        if package.name.count(":") == 1:
            try:
                _number(package / "energy_uj")
                found.append((package, _number(package / "max_energy_range_uj")))
            except (OSError, ValueError) as error:  # only root may read it on most systems
                log.info("the power of the processor is unknown: %s", error)
                return []
    return found


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
