"""Accelerators under torch's generic names: what is written for one runs on all that torch has.

``torch.accelerator``, ``torch.Event`` and ``torch.get_device_module`` are there since torch 2.6; what only a device's
own module has is asked of it.
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

from .redaction import text_of

__all__ = [
    "LateCopy",
    "accelerator",
    "gather_objects",
    "gather_results",
    "host_group",
    "isolated_random_numbers",
    "random_states",
    "release_memory",
    "restore_random_states",
]

_Result = TypeVar("_Result")


def accelerator() -> torch.device | None:
    """The kind of accelerator that this process can use; None where there is only the host."""
    return torch.accelerator.current_accelerator(check_available=True)


class LateCopy:
    """A copy of a tensor for the host that nobody waits for: it comes over while the program goes on.

    Args:
        source: On any device; a tensor of the host is taken as it is.

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
        """Whether it can be read without waiting."""
        return self._arrived is None or bool(self._arrived.query())

    def read(self) -> torch.Tensor:
        """The copy; waits for the device if it is not there yet."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        self._arrived = None
        return self._copy


def random_states() -> dict[str, list[torch.Tensor]]:
    """The states of the global generators of every accelerator, by its kind; nothing of one that nobody has used."""
    device = accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    # To ask one that nobody has used would start it, which takes its memory.
    if device is None or not getattr(module, "is_initialized", lambda: True)():
        return {}
    whole = getattr(module, "get_rng_state_all", None)  # not there for Apple's, of which a machine has one
    return {device.type: list(whole()) if whole is not None else [module.get_rng_state()]}


def restore_random_states(states: Mapping[str, Sequence[torch.Tensor]]) -> list[str]:
    """Take over states that `random_states` gave.

    Returns:
        What is lost because this process does not have the device, in words.
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
    """Random numbers that a block draws change none after it: those of Python, NumPy, torch, and every accelerator."""
    devices = random_states()
    try:
        with isolate_rng(include_cuda=False):  # of accelerators Lightning knows CUDA alone
            yield
    finally:
        restore_random_states(devices)


def host_group(timeout: dt.timedelta | None = None) -> dist.ProcessGroup:
    """A process group of all ranks for what is in host memory; None stands for torch's default `timeout`."""
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    # Where the ranks' device is known, torch asks a new group for its part, which gloo has of itself for CUDA alone.
    backend = "gloo" if bound is None else f"cpu:gloo,{bound.type}:gloo"
    made: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
    return made


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank of `group`, in order; to be called by all of them. None means all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_results(
    act: Callable[[], _Result], group: dist.ProcessGroup | None = None
) -> list[tuple[_Result | None, str | None]]:
    """The results of `act` on all ranks of `group`, in order, and what it raised there, in words. Collective.

    Raises:
        Exception: What it raised on this rank, once the others no longer wait for this one.
    """
    result: _Result | None = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    said = None if failure is None else f"{type(failure).__qualname__}: {text_of(failure)}"
    gathered = gather_objects((result, said), group)
    if failure is not None:
        raise failure
    return gathered


def release_memory() -> None:
    """Give memory back that nothing refers to any more, so that another program can have it."""
    device = accelerator()
    if device is not None:
        gc.collect()
        getattr(torch.get_device_module(device), "empty_cache", lambda: None)()
