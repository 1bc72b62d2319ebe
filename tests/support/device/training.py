"""The device in Lightning: its accelerator, and its strategies."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from support.device import NAME, load


class SimAccelerator(Accelerator):
    """The accelerator of ``Trainer(accelerator="sim")``, once this module is imported."""

    def setup_device(self, device: torch.device) -> None:
        load().set_device(device)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else [int(each) for each in devices]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(NAME, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return load().device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


def one_device(index: int = 0) -> dict[str, Any]:
    """Arguments of a trainer on one device; by itself Lightning takes the host for accelerators that it has not."""
    strategy = SingleDeviceStrategy(torch.device(NAME, index))
    return {"accelerator": NAME, "devices": [index], "strategy": strategy}


class SimDDPStrategy(DDPStrategy):
    """Lightning's own makes a stream of CUDA for any device that is not the host."""

    def determine_ddp_device_ids(self) -> None:
        return None


AcceleratorRegistry.register(NAME, SimAccelerator, description="an accelerator for tests")
