"""Optimizers that a trainer steps though they were not there after ``configure``."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch.optim import Optimizer

from ..contract.exceptions import ContractError

__all__ = ["UnknownOptimizers"]


class UnknownOptimizers:
    """Refuses optimizers that were not found, where they train a known module or are used in more than one step.

    One that lives for a single step, to invert a latent for example, is the trainer's own affair.

    Args:
        parameters: Ids of the parameters of the known modules.
        refuse_lasting: Whether to refuse one that is used in a second step: where gradients are averaged or scaled.
    """

    def __init__(self, parameters: Collection[int], *, refuse_lasting: bool) -> None:
        self._parameters = parameters
        self._refuse_lasting = refuse_lasting
        self._first_used: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def check(self, optimizer: Optimizer, step: int) -> None:
        """`optimizer` is about to update in `step`.

        Raises:
            ContractError: It is one to refuse.
        """
        if self._refuse_lasting and self._first_used.setdefault(optimizer, step) != step:
            raise ContractError(
                f"`train_step` updates by an optimizer ({type(optimizer).__name__}) that is neither in the state "
                "nor on the trainer, so that ranks would drift apart and overflows of fp16 would not be seen. "
                "Build every module and optimizer in `configure`, and keep it in the state or on the trainer."
            )
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            raise ContractError(
                f"`train_step` updates a module by a {type(optimizer).__name__} that was not there after "
                "`configure`, so the strategy does not know it. Build every optimizer in `configure`, and keep it "
                "in the state or on the trainer."
            )
