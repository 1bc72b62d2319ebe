"""When, in a step on several ranks, gradients are averaged: before anything reads or uses them.

`gradient_sync` says how they are averaged, and `lazy_sync` how a read is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .equal_replicas import average_scalar
from .gradient_sync import GradientSync
from .lazy_sync import Accumulation
from .rank_points import Point, Why, users_line
from .step_part import BackwardCall, StepPart
from .torch_internals import is_gradtrackingtensor, runs_compiled_code

__all__ = ["Averaging"]

log = logging.getLogger(__name__)

_APART = (
    "The %d ranks do not train together: `train_step` changes nothing that genlight could average (no optimizer, and "
    "no module or tensor that requires a gradient), and does not talk to the other ranks. Each rank trains on its own "
    "rows, and ends with values of its own. Keep what is trained as tensors that require gradients, average it with "
    "torch.distributed, or use one device."
)


class Averaging(StepPart):
    """Averages the gradients of the ranks around what the trainer does in a step.

    Args:
        gradients: Averages them.
        device: Root device of this rank.
        optimizers: Ids of the optimizers whose gradients are averaged.
        parameters: Ids of the modules' parameters.
        at_once: Whether to average after each backward call, rather than when one is read.
        averaged: Called each time gradients were averaged.
        completed_steps: How many steps the run has behind it, for messages.
        is_last_step: Whether the step that runs is the last one, on all ranks.
    """

    def __init__(
        self,
        gradients: GradientSync,
        device: torch.device,
        *,
        optimizers: Collection[int],
        parameters: Collection[int],
        at_once: bool,
        averaged: Callable[[], None],
        completed_steps: Callable[[], int],
        is_last_step: Callable[[], bool],
    ) -> None:
        self._gradients = gradients
        self.group = gradients.group
        self._device = device
        self._optimizers = optimizers
        self._parameters = parameters
        self._call_averaged = averaged
        self._completed_steps = completed_steps
        self._is_last_step = is_last_step
        self._accumulation = None if at_once else Accumulation(gradients.parameters, self._settle, self._offer)
        self._updates = 0
        self._in_update = False
        self._update_line = self._last_update = ""
        """Lines of the trainer's code: of the update that is about to be made, and of the last one that was."""
        self._may_be_written = False
        """Whether a gradient by a parameter was computed that the trainer may put to ``.grad`` itself."""
        self._averaged: set[int] = set()
        """Optimizers whose gradients are those of all ranks, as far as is known; each until its next update."""
        self._was_averaged = False
        """Whether this step has averaged gradients."""
        self._told_of_graphs = False
        self._may_be_apart = not gradients.trains
        """Whether nothing says yet that the ranks train together."""

    @property
    def waits(self) -> bool:
        """Whether gradients of steps before wait for an update, and are each rank's own."""
        return self._accumulation is not None and self._accumulation.waits

    @waits.setter
    def waits(self, waits: bool) -> None:
        if self._accumulation is not None:
            self._accumulation.waits = waits

    @override
    def begin(self, step: int) -> None:
        self._was_averaged = False
        if self._accumulation is not None:
            self._accumulation.begin()

    @override
    def end(self) -> None:
        """A step ends: average what it has left, or let it wait, and find out about ranks that are elsewhere."""
        if self._accumulation is not None:
            self._accumulation.end()
        if self._may_be_apart:
            self._may_be_apart = False
            if dist.get_rank(self.group) == 0:
                log.warning(_APART, dist.get_world_size(self.group))
        if self.waits:
            pass  # all ranks are at the end of this step
        elif not self._was_averaged:
            self._gradients.take_no_part(self._point(Why.NOTHING))
        elif self._is_last_step():  # no step follows whose exchange would meet one that another rank makes still
            self._gradients.take_no_part(self._point(Why.LAST))

    @override
    def abandon(self) -> None:
        self._gradients.abandon()
        if self._accumulation is not None:
            self._accumulation.abandon()

    @override
    def close(self) -> None:
        """Training is over, or has failed wherever that was: who reads a gradient now has no other rank wait for it."""
        if self._accumulation is not None:
            self._accumulation.unguard()

    def ended(self) -> None:
        """Training ended as planned, on all ranks."""
        self._gradients.close(self._point(Why.LAST))

    def before_collective(self, name: str) -> None:
        """Average what a rank that reads a gradient would wait for, while this one waits elsewhere."""
        self._may_be_apart = False
        if self._accumulation is not None:
            self._accumulation.settle(Why.COLLECTIVE, name)

    @override
    def before_backward(self, call: BackwardCall) -> None:
        ordinal = 0
        if self._accumulation is not None:
            self._accumulation.before_backward()
            ordinal = self._accumulation.settled
        at = Point(Why.BACKWARD, self._completed_steps() + 1, ordinal, self._updates)
        self._gradients.before_backward(at)

    @override
    def leave_backward(self, *, failed: bool) -> None:
        self._gradients.after_backward()
        if self._accumulation is not None:
            self._accumulation.leave_backward()

    @override
    def after_backward(self) -> None:
        if self._accumulation is not None:
            self._accumulation.after_backward()
        else:
            self._settle(0, Why.BACKWARD)

    @override
    def grad(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Give the mean of all ranks where nothing tells when the result is used.

        So for tensors that no optimizer updates, and for all within an update, such as products with the Hessian.
        """
        _, create_graph, inputs = (*args, False, False, ())[:3]
        if any(self._may_be_parameter(tensor) for tensor in inputs):
            self._may_be_written = True
            if self._accumulation is not None:
                self._accumulation.expect_writes()
        result = run(outputs, grads, *args, **kwargs)
        wanted = {id(p) for p in self._gradients.parameters()} if self._in_update else self._gradients.by_hand
        given = {id(p): g for p, g in zip(inputs, result, strict=True) if id(p) in wanted}
        if not given or create_graph:
            return result
        new = self._gradients.average_given(given, self._point(Why.AUTOGRAD_GRAD))
        self._was_averaged = True
        return tuple(new.get(id(p), g) for p, g in zip(inputs, result, strict=True))

    @override
    def before_update(self, optimizer: Optimizer, *, in_backward: bool) -> bool:
        """Average what backward calls left, and gradients that a trainer wrote itself, from torch.autograd.grad say."""
        self._in_update = True
        self._update_line = users_line()
        if in_backward:
            self._average_inside_of_backward(optimizer)
            return True
        first = next((p for group in optimizer.param_groups for p in group["params"]), "nothing")
        if self._accumulation is not None:
            self._accumulation.before_update(first)
        if self._may_be_written or id(optimizer) not in self._averaged:
            self._settle(0, Why.UPDATE, first)
        self._may_be_written = False
        self._updated_by(optimizer)
        return True

    def _average_inside_of_backward(self, optimizer: Optimizer) -> None:
        """Average the gradients of one optimizer that a hook of a parameter steps while backward still runs."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients.average_inside_of_backward(parameters, self._point(Why.INSIDE, 0, next(iter(parameters), "")))
        self._was_averaged = True
        self._updated_by(optimizer)

    def _updated_by(self, optimizer: Optimizer) -> None:
        self._averaged.discard(id(optimizer))
        if id(optimizer) in self._gradients.shared:
            self._updates += 1
            self._last_update = self._update_line

    @override
    def after_update(self, optimizer: Optimizer) -> None:
        self._in_update = False
        if self._accumulation is not None:
            self._accumulation.resume()

    @override
    def of_loss(self, loss: Any) -> Any:
        """The mean of a closure's loss over the ranks: a line search decides by it, and must do so alike on all."""
        return average_scalar(loss, self._device, self._gradients.group)

    def _settle(self, ordinal: int, why: Why, what: Tensor | str = "") -> None:
        """Make the gradients those of all ranks."""
        if why is Why.READ and not self._told_of_graphs and runs_compiled_code():
            self._told_of_graphs = True
            log.warning(
                "torch.compile cannot take a read of `.grad` on several ranks into a graph, because it has the "
                "gradients averaged: what is compiled around %s runs in parts, and `fullgraph=True` refuses it. Read "
                "gradients, or clip them, outside of compiled code.",
                users_line(),
            )
        self._gradients(self._point(why, ordinal, what))
        self._were_averaged()
        if why is Why.UPDATE:
            self._may_be_written = False

    def _offer(self, ordinal: int) -> bool:
        """Let gradients wait for an update of a later step, unless they may not or another rank averages."""
        if not self._gradients.may_wait():
            self._settle(ordinal, Why.END_OF_STEP)
            return True
        if not self._gradients.offer(self._point(Why.END_OF_STEP, ordinal)):
            self._averaged.clear()
            return False
        self._were_averaged()
        return True

    def _were_averaged(self) -> None:
        self._averaged = set(self._optimizers)
        self._was_averaged = True
        self._call_averaged()

    def _point(self, why: Why, ordinal: int = 0, what: Tensor | str = "") -> Point:
        """Where this rank is now."""
        if why in (Why.UPDATE, Why.INSIDE):
            where = self._update_line
        else:
            where = "" if why in (Why.END_OF_STEP, Why.NOTHING, Why.LAST) else users_line()
        step = self._completed_steps() + 1
        return Point(why, step, ordinal, self._updates, what, where, self._last_update)

    def _may_be_parameter(self, tensor: Any) -> bool:
        """Whether a gradient by `tensor` may be one of a parameter: torch.func differentiates by stand-ins of them."""
        if id(tensor) in self._parameters:
            return True
        return isinstance(tensor, Tensor) and is_gradtrackingtensor(tensor)
