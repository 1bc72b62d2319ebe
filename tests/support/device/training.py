"""The device in Lightning: its accelerator, and its strategies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from genlight.adapter import FSDP2Strategy
from support.device import NAME, PROCESS_GROUP, load

__all__ = ["SimAccelerator", "SimDDPStrategy", "SimFSDP2Strategy", "one_device"]


class SimAccelerator(Accelerator):
    """Of a trainer as ``accelerator="sim"``, once this module is imported."""

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


class SimFSDP2Strategy(FSDP2Strategy):
    """Lightning's own binds the process group to the device, and torch wants of such a group that it splits as NCCL."""

    def setup_environment(self) -> None:
        here = self.cluster_environment
        assert here is not None
        place = f"tcp://{here.main_address}:{here.main_port}"
        dist.init_process_group(PROCESS_GROUP, init_method=place, rank=here.global_rank(), world_size=here.world_size())
        super().setup_environment()


AcceleratorRegistry.register(NAME, SimAccelerator, description="an accelerator for tests")
