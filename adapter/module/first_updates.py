"""Check the first updates of a training for faults of a trainer class that raise no error.

It costs a few hooks on small parameters until each optimizer has made two updates, and does not wait for a device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.optimizer_state import parameters_of, with_step_hooks
from ..discovery.discover import Discovered, Found

log = logging.getLogger(__name__)

UPDATES = 2
"""Number of updates of each optimizer that are checked."""
_WATCHED = 4
"""Number of parameters of each optimizer that have a hook: the smallest, because their gradients are kept."""


class _Kept:
    """A gradient after an update, and the version that it has as long as only backward calls have added to it."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient, self.version, self.was_added_to = gradient, gradient._version, False

    def is_in(self, parameter: Tensor) -> bool:
        """Whether the parameter still has this gradient, not cleared."""
        return parameter.grad is self.gradient and self.gradient._version == self.version


class FirstUpdates:
    """Warns of gradients that nobody clears, and of optimizers that never find a gradient.

    Args:
        discovered: The objects of the trainer.
        logs: Whether this rank logs.

    Attributes:
        is_over: Whether each optimizer has made `UPDATES` updates.
    """

    def __init__(self, discovered: Discovered, *, logs: bool) -> None:
        self._logs, self.is_over = logs, False
        self._names = {
            id(parameter): f"{found.path}.{name}"
            for found in discovered.modules
            for name, parameter in found.value.named_parameters()
        }
        self._left = {id(found.value): UPDATES for found in discovered.optimizers}
        self._kept: dict[int, _Kept] = {}
        self._without_gradient: set[int] = set()
        self._handles: list[Any] = []
        for found in discovered.optimizers:
            self._watch(found)

    def _watch(self, found: Found[Optimizer]) -> None:
        inner = with_step_hooks([found.value])[:1]
        if not inner:  # this optimizer calls no hooks
            self._left.pop(id(found.value))
            return
        (optimizer,) = inner
        # Without the uninitialized parameters of lazy modules, which have another type and no size.
        trainable = (each for each in parameters_of(found.value) if type(each) is nn.Parameter and each.requires_grad)
        watched = sorted(trainable, key=Tensor.numel)[:_WATCHED]
        for parameter in watched:
            hook = functools.partial(self._before_adding, parameter)
            self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        before, after = functools.partial(self._before_update, watched), functools.partial(self._after_update, found)
        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(functools.partial(after, watched)))

    def _before_adding(self, parameter: Tensor, _: Tensor) -> None:
        kept = self._kept.get(id(parameter))
        if kept is None:
            return
        if kept.is_in(parameter):
            kept.version, kept.was_added_to = kept.version + 1, True
        else:
            del self._kept[id(parameter)]

    def _before_update(self, watched: Sequence[Tensor], *_: Any) -> None:
        stale = [
            self._names.get(id(parameter), "a parameter")
            for parameter in watched
            if (kept := self._kept.pop(id(parameter), None)) is not None
            and kept.was_added_to
            and parameter.grad is kept.gradient
        ]
        if stale and self._logs:
            self._logs = False
            log.warning(
                "The gradient of %s was not cleared after the previous update, so each update adds up all batches so "
                "far. Call `zero_grad` between an update and the next backward call.",
                stale[0],
            )

    def _after_update(self, found: Found[Optimizer], watched: Sequence[Tensor], *_: Any) -> None:
        for parameter in watched:
            if parameter.grad is not None:
                self._kept[id(parameter)] = _Kept(parameter.grad)
        if any(parameter.grad is not None for parameter in parameters_of(found.value)):
            self._without_gradient.discard(id(found.value))
        elif self._left[id(found.value)] == UPDATES:
            self._without_gradient.add(id(found.value))
        self._left[id(found.value)] -= 1
        if self._left[id(found.value)] == 0 and id(found.value) in self._without_gradient and self._logs:
            log.warning(
                "None of the parameters of %s had a gradient in its first %d updates. They may be copies of the "
                "parameters that the model trains. Build it from `model.parameters()` after the model has its final "
                "form.",
                found.path,
                UPDATES,
            )
        self.is_over = all(left <= 0 for left in self._left.values())

    def close(self) -> None:
        """Remove all hooks. Not within an update: torch iterates over the hooks of an optimizer in its `step`."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._kept = [], {}
