"""Averages gradients when they are first read, so that accumulating them over several backward calls costs once.

While a step runs, the managed parameters are guarded until their update: after a backward call the first read of any
``.grad``, by any code, averages before it answers. So does an update, and the end of the step. A gradient that a
trainer writes to ``.grad`` itself counts like one of backward: the first read of it, or an update, averages.

Nobody ever sees the gradient of one rank alone, and whether a trainer accumulates, clips or logs, each gradient is
averaged exactly as often as it must be. What happens depends on the trainer's code alone, never on what was learned
earlier, so that a resumed run does the same sums.

Gradients that a step leaves without an update may wait for the update of a later step. Between steps parameters are
plain, and such gradients are each rank's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .buckets import read_gradient, write_gradient
from .rank_points import Why
from .torch_internals import disabled_torch_function, post_accumulate_hooks

__all__ = ["Accumulation"]


class Accumulation:
    """Puts the averaging of gradients off until they are wanted.

    A parameter of a class of its own, or one with a hook that runs when its gradient was accumulated, cannot be
    guarded; gradients are then averaged after each backward call.

    Args:
        parameters: The parameters whose gradients are averaged, as they are now; the same list while they are the same.
        settle: Averages them. Its arguments are how many times that was done for this update already, why it is done
            now, and for what: the parameter whose gradient is read, or a name.
        offer: At the end of a step without an update, lets gradients wait for a later step, or averages them where
            they may not, and where another rank does. Its argument is that of `settle`; its result whether they were
            averaged. None averages them.

    Attributes:
        waits: Whether gradients were accumulated that have not been averaged.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[Tensor]],
        settle: Callable[[int, Why, Tensor | str], None],
        offer: Callable[[int], bool] | None = None,
    ) -> None:
        self._parameters = parameters
        self._settle_now = settle
        self._offer = offer
        self.settled = 0
        """How many times gradients were averaged since the last update."""
        self.waits = False
        self._written: set[int] = set()
        """Ids of the parameters whose gradient the trainer has written, since gradients were averaged."""
        self._in_backward = False
        self._known: Sequence[Tensor] | None = None
        self._guarded: dict[type, list[Tensor]] = {}
        """What of `_known` can be guarded, by its own class; all of it or nothing."""
        self._is_on = False
        self._classes: dict[type, type[Any]] = {kind: _guarding(kind, self) for kind in (nn.Parameter, Tensor)}

    def begin(self) -> None:
        """A step begins."""
        self._guard()

    def before_backward(self) -> None:
        """A backward call begins: what it adds to is still this rank's own, or equal on all ranks."""
        self._in_backward = True

    def after_backward(self) -> None:
        """A backward call has ended."""
        self._in_backward = False
        self.waits = True
        if not self._guard():
            self.settle(Why.BACKWARD)

    def leave_backward(self) -> None:
        """A backward call is over, or has raised; the trainer may go on."""
        self._in_backward = False

    def expect_writes(self) -> None:
        """The trainer has computed gradients that it may write itself."""
        self._guard()

    def before_update(self, what: Tensor | str = "") -> None:
        """An update follows: gradients are those of all ranks, and read without a detour, until `resume`."""
        self.settle(Why.UPDATE, what)
        self.unguard()
        self.settled = 0

    def resume(self) -> None:
        """The trainer's own code goes on after an update, or in a closure of one."""
        for kind, parameters in self._guarded.items():
            own = self._classes[kind]
            for parameter in parameters:
                # Only a class can have a property `grad`; the parameter has to stay the object that everybody holds.
                parameter.__class__ = own
        self._is_on = True

    def end(self) -> None:
        """The step ends; gradients are those of all ranks, or wait for a later step."""
        try:
            if self._offer is None:
                self.settle(Why.END_OF_STEP)
            elif self.waits or self._written:
                self.waits = False  # where this fails, nothing may wait for other ranks any more
                self._written.clear()
                self.waits = not self._offer(self.settled)
        finally:
            self.unguard()
            self.settled = 0

    def abandon(self) -> None:
        """The step failed: the other ranks may not come this far, so nothing is averaged."""
        self.unguard()
        self.waits = self._in_backward = False
        self._written.clear()
        self.settled = 0

    def settle(self, why: Why, what: Tensor | str = "") -> None:
        """Average what was accumulated or written since that was done last."""
        if self.waits or self._written:
            self.waits = False
            self._written.clear()
            self._settle_now(self.settled, why, what)
            self.settled += 1

    def on_read(self, parameter: Tensor) -> None:
        """The gradient of a guarded parameter is wanted."""
        if not self._in_backward and (self.waits or id(parameter) in self._written):
            self.settle(Why.READ, parameter)

    def on_write(self, parameter: Tensor, value: Tensor | None) -> None:
        """The gradient of a guarded parameter is about to become `value`."""
        if self._in_backward:
            return
        if self.waits:
            self.settle(Why.READ, parameter)
        if value is not None:
            self._written.add(id(parameter))
        else:
            self._written.discard(id(parameter))

    def _guard(self) -> bool:
        parameters = self._parameters()
        if parameters is not self._known:
            self.unguard()
            self._known = parameters
            kinds = {type(p) for p in parameters}
            can_be_guarded = kinds <= self._classes.keys()
            self._guarded = {k: [p for p in parameters if type(p) is k] for k in kinds} if can_be_guarded else {}
        if (parameters and not self._guarded) or any(map(post_accumulate_hooks, parameters)):
            self.unguard()
            return False
        if not self._is_on:
            self.resume()
        return True

    def unguard(self) -> None:
        """Parameters are plain again: nothing is averaged because they are read."""
        for kind, parameters in self._guarded.items():
            for parameter in parameters:
                parameter.__class__ = kind
        self._is_on = False

    def unguard_one(self, parameter: Tensor, kind: type) -> None:
        """Give a parameter its own class back until it is guarded again."""
        parameter.__class__ = kind
        self._is_on = False


def _guarding(kind: type[Any], accumulation: Accumulation) -> type[Any]:
    """A subclass of `kind` that has gradients averaged before one is given out."""

    def read(self: Any) -> Any:
        accumulation.on_read(self)
        return read_gradient(self)

    def write(self: Any, value: Any) -> None:
        accumulation.on_write(self, value)
        write_gradient(self, value)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        accumulation.on_read(self)
        accumulation.unguard_one(self, kind)
        return copy.deepcopy(self, memo)

    def reduced(self: Any, protocol: Any) -> Any:
        accumulation.on_read(self)
        accumulation.unguard_one(self, kind)
        return self.__reduce_ex__(protocol)

    members = {
        "grad": property(read, write),
        "__deepcopy__": copied,
        "__reduce_ex__": reduced,
        # Of torch.Tensor, too, what is computed from it is of no class of ours.
        "__torch_function__": disabled_torch_function,
    }
    return type(kind.__name__, (kind,), members)
