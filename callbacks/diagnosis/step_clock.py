"""How long this rank works on a step, without its wait for others."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..optimizer_state import with_step_hooks
from .contained import contained

__all__ = ["StepClock"]

_Mark = float | torch.cuda.Event


class StepClock:
    """Measures from one update to the last gradient before the next.

    Ranks leave the update together, as it needs the gradients of all, and wait for each other again once the last
    gradient is there. In between are the update, callbacks, data, forward and backward of this rank alone. Of sharded
    modules, whose ranks also meet in between, it says little.

    Args:
        optimizers: Torch's optimizers of the run.
        first: The parameter whose gradient comes last: the first that a forward uses.
        device: What trains; on a GPU its own time is measured.
        failures: Takes what goes wrong within a step.
    """

    def __init__(
        self,
        optimizers: list[Optimizer],
        first: torch.nn.Parameter | None,
        device: torch.device,
        failures: list[Exception],
    ) -> None:
        self.failures = failures
        self._optimizers = optimizers
        self._first = first
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._began: _Mark | None = None
        self._spans: list[tuple[_Mark, _Mark]] = []

    def attach(self) -> None:
        """Measure from now on, and forget what was measured before."""
        self._spans.clear()
        self._began = None
        if not self._handles and self._first is not None and self._first.is_leaf:
            self._handles.append(self._first.register_post_accumulate_grad_hook(self._end))  # type: ignore[no-untyped-call]
            self._handles += [o.register_step_pre_hook(self._begin) for o in with_step_hooks(self._optimizers)]

    def detach(self) -> None:
        """Measure no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def seconds(self) -> float | None:
        """The median of what was measured; None where that is nothing. Waits for a GPU."""
        spans = [_between(*span) for span in self._spans]
        return statistics.median(spans) if spans else None

    @contained
    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._began = self._mark()

    @contained
    def _end(self, parameter: torch.Tensor) -> None:
        if self._began is not None:
            self._spans.append((self._began, self._mark()))
            self._began = None

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(began: _Mark, ended: _Mark) -> float:
    if isinstance(began, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000
    assert isinstance(ended, float)
    return ended - began
