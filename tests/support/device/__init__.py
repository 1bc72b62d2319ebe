"""A simulated accelerator for tests, ``sim``, that shows errors which otherwise only a GPU shows.

It is a C++ extension that registers torch's PrivateUse1 device, with the kernels of the host and the rules of a GPU:

- A process that reads its memory from the host is killed. Tensors of host and device do not mix.
- Backward runs in a thread of the device, not in the calling thread.
- Unwritten and freed memory is nan.
- A copy to pinned memory (``non_blocking``) arrives when the host has waited for it; until then the target is nan.
  The source of a copy to the device may not change before that.
- Each device has separate random numbers. There are streams, events, autocast, and two devices (``SIM_DEVICES``).
- Its process group, ``simccl``, refuses tensors of the host. With `Waiting.STREAM`, waiting for a collective returns at
  once, as with NCCL: if a rank is lost, everything that needs its data waits without an error and without end.
- `waits` lists each time that the host waits for the device, with its place in the program.

It cannot show the order of kernels on several streams (they run immediately), durations, kernels that round differently
from the host's, the inner work of allocators and NCCL, or graphs of kernels.

Loading it gives the process an accelerator. Therefore tests start separate processes that call `load` first::

    from support.device import run_on_device          # in a test
    run_on_device("program.py", *arguments, world_size=2)

    from support.device import load, waits            # in the program of a rank
    sim = load()

It is built once for each release of torch, in well under a minute, and kept; `reason_to_skip` explains why it cannot.
"""

import contextlib
import enum
import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from support.device.build import BuildError, build
from support.rank_processes import run_ranks

NAME = "sim"
PROCESS_GROUP = "simccl"
OWN_FOLDER = os.path.dirname(__file__) + os.sep


class Waiting(enum.Enum):
    """Whether the host or the stream waits for a collective; set by the environment variable ``SIM_WAITING``."""

    HOST = "host"
    """It returns when the collective is done, and raises what went wrong, as with gloo."""
    STREAM = "stream"
    """It returns at once, and the device waits, as with NCCL."""


@dataclass(frozen=True)
class Wait:
    """The host waited for the device."""

    kind: str
    """``item``, ``copy to host``, ``copy to device``, ``event``, ``stream``, ``device``, ``operator``, ``barrier``."""
    what: str
    """The shape that was copied, or the operator."""
    frames: tuple[traceback.FrameSummary, ...]
    """The frames of the place, innermost last."""

    def __str__(self) -> str:
        place = "\n".join(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(self.frames[-12:]))
        return f"{self.kind} {self.what}\n{place}"


_listeners: list[list[Wait]] = []
_races: list[str] = []


@functools.cache
def load() -> ModuleType:
    """Give this process the device; returns ``torch.sim``.

    Raises:
        BuildError: It cannot be built here.
    """
    import torch

    extension = _import_extension()
    torch.utils.rename_privateuse1_backend(NAME)
    from support.device import torch_sim

    torch_sim.connect(extension)
    sys.modules[f"torch.{NAME}"] = torch_sim
    torch._register_device_module(NAME, torch_sim)
    torch.utils.generate_methods_for_privateuse1_backend()
    extension.listen(_on_report, _place)
    if torch.distributed.is_available():
        torch_sim.register_process_group(PROCESS_GROUP, Waiting(os.environ.get("SIM_WAITING", "host")).value == "host")
    return torch_sim


@functools.cache
def reason_to_skip() -> str:
    """Why there can be no device here; empty if there can be. Builds it."""
    try:
        build()
    except BuildError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def waits() -> Iterator[list[Wait]]:
    """Lists each time that the host waits for the device within the block, in any thread."""
    found: list[Wait] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)


def races() -> list[str]:
    """Descriptions of everything that would have gone wrong on a GPU in this process."""
    return list(_races)


def run_on_device(
    program: str, *arguments: object, world_size: int = 1, waiting: Waiting = Waiting.HOST, **more: Any
) -> str:
    """Run `world_size` ranks of a program that calls `load`; return their output. Skips the test without a device."""
    import pytest

    if reason := reason_to_skip():
        pytest.skip(reason)
    return run_ranks(program, *arguments, world_size=world_size, environ={"SIM_WAITING": waiting.value}, **more)


def _import_extension() -> ModuleType:
    file = build()
    spec = importlib.util.spec_from_file_location("_sim", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _on_report(kind: str, what: str) -> None:
    if kind == "race":
        _races.append(what)
        return
    if _listeners:
        found = Wait(kind, what, tuple(_frames()))
        for each in _listeners:
            each.append(found)


def _place() -> str:
    frames = _frames()
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the device's thread"


def _frames() -> list[traceback.FrameSummary]:
    """The stack without what this package does."""
    return [frame for frame in traceback.extract_stack() if not frame.filename.startswith(OWN_FOLDER)]
