"""The interface of a training step's parts: one concern each, such as averaging, fp16 or a guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@dataclass
class BackwardCall:
    """One backward call of the trainer; parts of a step may change it before it runs."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    """Gradients of `outputs`, from which backward computes all others."""
    create_graph: bool
    inputs: Sequence[Tensor] = ()
    """The ``inputs`` of the call, whose gradients it accumulates; empty for all leaves."""


class StepPart:
    """No-op defaults; a part overrides the calls it needs.

    The router calls each method of all parts, in the order of its list. After ``begin`` it calls ``end``, or
    ``abandon`` if the step failed. After ``before_backward`` it calls ``leave_backward``, and then
    ``after_backward`` if the backward call succeeded. After ``before_update`` it calls ``after_update``, also if the
    update failed or was skipped, except for a `step` that bypasses the router (see `StepRouter.check_managed`).
    """

    may_skip: str = ""
    """Name of the setting by which this part can skip updates; empty if it cannot.

    If a part can, closures are evaluated before the update.
    """

    def open(self) -> None:
        """Called when training begins, with the modules on their device."""

    def close(self) -> None:
        """Called when training has ended or failed."""

    def begin(self, step: int) -> None:
        """Called when a step begins; `step` counts from 1 and is equal on all ranks."""

    def before_backward(self, call: BackwardCall) -> None:
        """Called before a backward call runs; the part may change its gradients and inputs."""

    def leave_backward(self, *, failed: bool) -> None:
        """Called when a backward call has ended or raised; after an error the trainer may still continue."""

    def after_backward(self) -> None:
        """Called when a backward call has succeeded."""

    def grad(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call of ``torch.autograd.grad``: `run` passes it to the next part, or after the last to the engine."""
        return run(outputs, grads, *args, **kwargs)

    def within_backward(self, run: Callable[..., Any], outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Like `grad`, for a call of torch's engine within a backward call, as from a checkpointed segment."""
        return run(outputs, grads, *args, **kwargs)

    def before_update(self, optimizer: Optimizer) -> bool:
        """Called before a managed optimizer updates; return False to skip the update."""
        return True

    def before_foreign_update(self, optimizer: Optimizer) -> None:
        """Called before an update by an optimizer that the step itself created, for a clone or a latent for example."""

    def after_update(self, optimizer: Optimizer) -> None:
        """Called when the update was made or skipped, and before each evaluation of its closure."""

    def map_loss(self, loss: Any) -> Any:
        """Return the loss that the optimizer gets instead of `loss`, the result of its closure."""
        return loss

    def end(self) -> None:
        """Called when the step has succeeded."""

    def before_save(self) -> None:
        """Called on all ranks before a checkpoint is saved; finish pending checks, and raise if one finds a fault."""

    def abandon(self) -> None:
        """Called when the step failed. Send nothing: the other ranks may not reach this point."""

    def explain(self, error: BaseException) -> Exception | None:
        """Return an error with the way out for `error` of the step; None if this part does not know one."""
        return None
