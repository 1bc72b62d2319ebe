"""The functions that torch and libraries expect in the module of a device, as ``torch.sim``."""

import datetime as dt
from types import ModuleType
from typing import Any

import torch

Event = torch.Event
Stream = torch.Stream
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
synchronize = torch.accelerator.synchronize
empty_cache = torch.accelerator.empty_cache
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated

_extension: Any = None


def connect(extension: ModuleType) -> None:
    """Use the extension that was built."""
    global _extension
    _extension = extension


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(_extension.device_count())


def current_device() -> int:
    return int(_extension.current_device())


def set_device(device: Any) -> None:
    _extension.set_device(_index(device))


class device:
    """Makes a device the current one within a block."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        _extension.set_device(self._index)

    def __exit__(self, *exception: object) -> None:
        _extension.set_device(self._before)


def stream(stream: torch.Stream) -> torch.Stream:
    """Makes a stream the current one within a block."""
    return stream


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def default_generators() -> list[torch.Generator]:
    return [_extension.default_generator(index) for index in range(device_count())]


def manual_seed(seed: int) -> None:
    _extension.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators():
        generator.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _extension.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _extension.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators(), states, strict=False):
        generator.set_state(state)


def pinned_bytes() -> int:
    """Host memory that is pinned now."""
    return int(_extension.pinned_bytes())


def pinned_allocations() -> int:
    """How often host memory was pinned so far."""
    return int(_extension.pinned_allocations())


def register_process_group(name: str, blocks_host: bool) -> None:
    """Make the process group of the device known to torch, as the one that belongs to it."""
    from torch.distributed import Backend, ProcessGroupGloo, Store

    def create(store: Store, rank: int, size: int, timeout: dt.timedelta) -> Any:
        return _extension.collectives(ProcessGroupGloo(store, rank, size, timeout), blocks_host)

    Backend.register_backend(name, create, devices=["sim"])


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index
