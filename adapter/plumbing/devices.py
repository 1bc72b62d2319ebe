"""Access to accelerators under torch's generic names, so that the same code runs on every kind of device.

``torch.accelerator``, ``torch.Event`` and ``torch.get_device_module`` exist since torch 2.6. A function that only some
kinds of devices have is looked up in the module of the kind, such as ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection

from .redaction import safe_str

_Result = TypeVar("_Result")


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process can use, or None."""
    return torch.accelerator.current_accelerator(check_available=True)


def memory_in_use(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that tensors occupy on a device, now and at most so far; None if it does not count them."""
    module: Any = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "max_memory_allocated"):
        return None
    return int(module.memory_allocated(device)), int(module.max_memory_allocated(device))


class LateCopy:
    """A copy of a tensor to the host that arrives while the program continues.

    Args:
        source: A tensor on any device; a tensor on the host is not copied.

    Attributes:
        is_late: Whether the source was on a device.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self.is_late = source.device.type != "cpu"
        self._arrived: torch.Event | None = None
        self._copy = source
        if self.is_late:
            # Memory that is not pinned would make the host wait for the device.
            self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(source, non_blocking=True)
            self._arrived = torch.Event(source.device)
            self._arrived.record(torch.accelerator.current_stream(source.device))

    def is_there(self) -> bool:
        """Whether the copy can be read without waiting."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> torch.Tensor:
        """Return the copy; wait for the device if it has not arrived yet."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        self._arrived = None
        return self._copy


def random_states() -> dict[str, list[torch.Tensor]]:
    """Return the states of the global generators of every accelerator, by kind; unused accelerators are skipped."""
    device = accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    # Reading an unused device would initialize it and take its memory.
    if device is None or not getattr(module, "is_initialized", lambda: True)():
        return {}
    read_all = getattr(module, "get_rng_state_all", None)  # Apple's module has none: a machine has one device
    return {device.type: [module.get_rng_state()] if read_all is None else list(read_all())}


def restore_random_states(states: Mapping[str, Sequence[torch.Tensor]]) -> list[str]:
    """Restore states that `random_states` returned.

    Returns:
        A description of each state that is lost because this process lacks the device.
    """
    device, lost = accelerator(), []
    for kind, saved in states.items():
        here = torch.accelerator.device_count() if device is not None and device.type == kind else 0
        for index, state in enumerate(saved[:here]):
            module: Any = torch.get_device_module(kind)
            module.set_rng_state(state.cpu(), *([index] if hasattr(module, "get_rng_state_all") else []))
        if len(saved) > here:
            lost.append(f"the random state of {len(saved) - here} {kind.upper()} devices that are not here")
    return lost


@contextlib.contextmanager
def isolated_random_numbers() -> Iterator[None]:
    """Restore the random states of Python, NumPy, torch and every accelerator after the block."""
    devices = random_states()
    try:
        with isolate_rng(include_cuda=False):  # Lightning handles only CUDA
            yield
    finally:
        restore_random_states(devices)


def host_group(timeout: dt.timedelta | None = None, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a process group of `ranks` for values in host memory. Collective over all ranks.

    If `ranks` is None, the group has all ranks; if `timeout` is None, it has torch's default.
    """
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    # If the ranks' device is known, a new group needs a backend for it; gloo has one by default only for CUDA.
    backend = "gloo" if bound is None else f"cpu:gloo,{bound.type}:gloo"
    made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timeout)
    return made


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return `value` of every rank of `group`, in order. Collective. None means all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_results(
    act: Callable[[], _Result], group: dist.ProcessGroup | None = None
) -> list[tuple[_Result | None, str | None]]:
    """Call `act` on all ranks of `group`; return for each rank the result, or the text of its exception. Collective.

    Raises:
        Exception: The exception of this rank, once the other ranks no longer wait for it.
    """
    result: _Result | None = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    text = None if failure is None else f"{type(failure).__qualname__}: {safe_str(failure)}"
    gathered = gather_objects((result, text), group)
    if failure is not None:
        raise failure
    return gathered


def release_memory() -> None:
    """Return unreferenced device memory, so that another program can use it."""
    if (device := accelerator()) is not None:
        gc.collect()
        getattr(torch.get_device_module(device), "empty_cache", lambda: None)()


def pinned(batch: Any) -> Any:
    """Return `batch` with its tensors in pinned memory, so that ``.to(device, non_blocking=True)`` does not wait.

    Tensors that are on a device, pinned or not strided stay unchanged, like everything else.
    """
    return apply_to_collection(batch, torch.Tensor, _pinned)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
