"""Averages gradients when somebody wants to see them, so that accumulating them over several backward calls costs once.

After a backward call the managed parameters are guarded: the first read of any ``.grad``, by whoever it is, averages
before it answers. So does an update, and the end of the step. Nobody ever sees the gradient of one rank alone, and
whether a trainer accumulates, clips or logs, each gradient is averaged exactly as often as it must be. What happens
depends on the trainer's code alone, never on what was learned earlier, so that a resumed run does the same sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Accumulation"]

_GRAD: Any = torch.Tensor.grad
"""The descriptor behind ``tensor.grad``."""


class Accumulation:
    """Puts the averaging of gradients off until they are wanted.

    A parameter of a class of its own, or one with a hook that runs when its gradient was accumulated, cannot be
    guarded; gradients are then averaged after each backward call.

    Args:
        parameters: The parameters whose gradients are averaged, as they are now.
        settle: Averages them; its argument is how many times that was done for this update already.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]], settle: Callable[[int], None]) -> None:
        self._parameters = parameters
        self._settle_now = settle
        self._settled = 0
        self._pending = False
        self._guarded: list[tuple[Tensor, type]] = []
        self._classes = {kind: _guarding(kind, self._on_read) for kind in (nn.Parameter, Tensor)}

    def before_backward(self) -> None:
        """A backward call begins: what it adds to is still this rank's own, or equal on all ranks."""
        self._unguard()

    def after_backward(self) -> None:
        """A backward call has ended."""
        self._pending = True
        if not self._guard():
            self._settle()

    def before_update(self) -> None:
        """An update, or the end of the step, follows: gradients are those of all ranks when this returns."""
        self._settle()
        self._settled = 0

    def abandon(self) -> None:
        """The step failed: the other ranks may not come this far, so nothing is averaged."""
        self._unguard()
        self._pending = False
        self._settled = 0

    def _on_read(self) -> None:
        self._settle()

    def _settle(self) -> None:
        self._unguard()
        if self._pending:
            self._pending = False
            self._settle_now(self._settled)
            self._settled += 1

    def _guard(self) -> bool:
        parameters = list(self._parameters())
        if any(type(p) not in self._classes or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
            return False
        for parameter in parameters:
            kind = type(parameter)
            self._guarded.append((parameter, kind))
            parameter.__class__ = self._classes[kind]
        return True

    def _unguard(self) -> None:
        for parameter, kind in self._guarded:
            parameter.__class__ = kind
        self._guarded.clear()


def _guarding(kind: type[Any], on_read: Callable[[], None]) -> type[Any]:
    """A subclass of `kind` that calls `on_read`, which takes it away again, before its gradient is given out."""

    def read(self: Any) -> Any:
        on_read()
        return _GRAD.__get__(self)

    def write(self: Any, value: Any) -> None:
        on_read()
        _GRAD.__set__(self, value)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        on_read()  # from here on it is of its own class
        return copy.deepcopy(self, memo)

    def reduced(self: Any, protocol: Any) -> Any:
        on_read()
        return self.__reduce_ex__(protocol)

    members = {"grad": property(read, write), "__deepcopy__": copied, "__reduce_ex__": reduced}
    return type(kind.__name__, (kind,), members)
