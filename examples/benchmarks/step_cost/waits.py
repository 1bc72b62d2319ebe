"""Find the places at which a run waits for its device, by step.

On CUDA torch itself reports them (``torch.cuda.set_sync_debug_mode``). On a CPU nothing waits; there the operations
that would wait are recorded: those that give Python the value of a tensor.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_READS = {
    _ATEN._local_scalar_dense.default,  # item(), float(), bool(), int()
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.equal.default,
    _ATEN._unique2.default,
}
_TORCH = str(Path(torch.__file__).parent)
_Note = Callable[[tuple[str, int] | None], None]
_OPTIMIZERS = str(Path(_TORCH, "optim"))
"""Optimizers keep their step counts in host memory and read them there, also on CUDA."""


@dataclass(frozen=True)
class Wait:
    """One wait for the device."""

    step: int
    place: str
    """File and line of the code that asked torch."""


@contextlib.contextmanager
def watching_for_waits(device: str, current_step: Callable[[], int]) -> Iterator[list[Wait]]:
    """Collect the waits of this thread within the block.

    Args:
        device: Such as ``cuda`` or ``cpu``.
        current_step: Returns the current step.
    """
    waits: list[Wait] = []

    def note(arose_at: tuple[str, int] | None) -> None:
        place = _place(arose_at)
        if place is not None:
            waits.append(Wait(current_step(), place))

    with _cuda_warnings(note) if torch.device(device).type == "cuda" else _Reads(note):
        yield waits


@contextlib.contextmanager
def _cuda_warnings(note: _Note) -> Iterator[None]:
    def seen(message: Any, category: Any, file: str, line: int, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            note((file, line))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Reads(TorchDispatchMode):
    def __init__(self, note: _Note) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._note(None)
        return func(*args, **(kwargs or {}))


def _place(arose_at: tuple[str, int] | None) -> str | None:
    """Return the nearest code outside of torch and this file; None for an optimizer that reads its own step count.

    Args:
        arose_at: File and line of a warning that may lie outside of the current stack; None begins here.
    """
    frames = [each for each, _ in traceback.walk_stack(sys._getframe(2))]
    lines = [(each.f_code.co_filename, each.f_lineno) for each in frames]
    frame = frames[lines.index(arose_at) if arose_at in lines else 0]
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS):
            return None
        if file != __file__ and not file.startswith(_TORCH) and Path(file).name not in ("warnings.py", "contextlib.py"):
            return f"{'/'.join(Path(file).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
