"""One concern of a training step, such as averaging, fp16 or a guard, behind calls that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["BackwardCall", "StepPart"]


@dataclass
class BackwardCall:
    """One backward call of the trainer, as parts of a step may change it before it runs."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    """Of `outputs`, where the backward begins."""
    retain_graph: bool
    create_graph: bool
    inputs: Sequence[Tensor] = ()
    """The ``inputs`` of the call, to accumulate in; empty for all leaves."""


class StepPart:
    """Does nothing; a part overrides what it has to do with.

    The router calls each method of all parts, in the order of its list. ``begin`` is followed by ``end``, or by
    ``abandon`` where the step failed; ``before_backward`` by ``leave_backward`` and, where the call succeeded,
    ``after_backward``; ``before_update`` by ``after_update``, also where the update failed or was left out.
    """

    may_skip: str = ""
    """The reason, where this part can leave out updates: a closure is then evaluated before the update."""

    def open(self) -> None:
        """Training begins, with the modules where they will be."""

    def close(self) -> None:
        """Training is over, or has failed."""

    def begin(self, step: int) -> None:
        """A step begins; `step` counts from 1 and is equal on all ranks."""

    def before_backward(self, call: BackwardCall) -> None:
        """A backward call is about to run; the part may change its gradients and inputs."""

    def leave_backward(self, *, failed: bool) -> None:
        """A backward call is over, or has raised; the trainer may go on."""

    def after_backward(self) -> None:
        """A backward call has ended."""

    def grad(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of ``torch.autograd.grad``, which accumulates nothing; `run` and the rest are torch's engine's."""
        return run(outputs, grads, *args, **kwargs)

    def within_backward(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of torch's engine that a backward call makes, as of a checkpoint or an adjoint; as `grad`."""
        return run(outputs, grads, *args, **kwargs)

    def before_update(self, optimizer: Optimizer) -> bool:
        """`optimizer`, a managed one, is about to update; whether it may."""
        return True

    def before_foreign_update(self, optimizer: Optimizer) -> None:
        """An optimizer that the step made itself, of a clone or a latent say, is about to update."""

    def after_update(self, optimizer: Optimizer) -> None:
        """The update was made or left out, or a closure of it is about to be evaluated."""

    def of_loss(self, loss: Any) -> Any:
        """The result of a closure, as the optimizer is to see it."""
        return loss

    def end(self) -> None:
        """The step has ended."""

    def before_save(self) -> None:
        """A checkpoint is about to be made, on all ranks: whatever is still to be found out decides it now."""

    def abandon(self) -> None:
        """The step failed: the other ranks may not come this far, so nothing is sent."""

    def explained(self, error: BaseException) -> Exception | None:
        """An error that says what to do about `error` of the step; None where this part does not know."""
        return None
