"""What a trainer is told whose update cannot be averaged, or could not be left out."""

from __future__ import annotations

from torch.optim import Optimizer

from ..contract.exceptions import ContractError

__all__ = ["outside_of_step", "own_closure", "taken_before", "without_optimizer"]


def without_optimizer() -> ContractError:
    """16-mixed without an optimizer."""
    return ContractError(
        "16-mixed needs an optimizer, in the state or on the trainer, whose update it can skip when gradients "
        "overflow; this trainer updates by hand. Use bf16-mixed or 32-true."
    )


def taken_before(optimizer: Optimizer, what: str) -> ContractError:
    """An optimizer's ``step`` that was taken before it was routed, where `what` must be able to leave updates out."""
    return ContractError(
        f"{what} cannot leave out an update of {type(optimizer).__name__} whose `step` was kept or compiled in "
        "`configure`: call `optimizer.step()` in `train_step`, or compile it there."
    )


def outside_of_step(optimizer: Optimizer) -> ContractError:
    """An update that no other rank would hear of."""
    return ContractError(
        f"{type(optimizer).__name__}.step() is called outside of `train_step` or in another thread, where the "
        "gradients of the ranks are not averaged. Call backward and step in `train_step`, in its own thread, or use "
        "one device."
    )


def own_closure(optimizer: Optimizer, what: str, instead: str) -> ContractError:
    """A closure given to an optimizer that is not torch's, where `what` must be able to leave updates out."""
    return ContractError(
        f"{what} cannot host {type(optimizer).__name__}.step(closure): an optimizer of your own may evaluate the "
        "closure at other weights, where an overflow could not be skipped. Call backward and its steps in `train_step` "
        f"yourself, or {instead}."
    )
