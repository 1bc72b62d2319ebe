"""The base class of the six-hook style."""

from __future__ import annotations

from typing import Any, Final, Literal

import lightning.pytorch as pl

from .trainer_view import TrainerView

__all__ = ["HOOKS", "Callback"]

HOOKS: Final = {
    "on_train_begin": "on_train_start",
    "on_train_end": "on_train_end",
    "on_epoch_begin": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_step_begin": "on_train_batch_start",
    "on_step_end": "on_train_batch_end",
}
"""The six hooks, and Lightning's hooks in which they are called."""


class Callback:
    """Base of callbacks that are handed the trainer, a `TrainerView`; a subclass overrides the hooks it wants.

    Put them into a `CallbackList`, which is a Lightning callback: ``Trainer(callbacks=[CallbackList([Mine()])])``.
    """

    critical: bool = False
    """Whether an exception of this callback ends the run; else it is logged once for each hook and counted."""
    ranks: Literal["zero", "all"] = "zero"
    """Which ranks run it."""
    needs_lightning: bool = False
    """Whether this one does nothing in a loop of one's own, where it is refused."""

    def on_train_begin(self, trainer: Any) -> None:
        """Training begins, of a new run or of a resumed one."""

    def on_train_end(self, trainer: Any) -> None:
        """Training has ended as planned."""

    def on_epoch_begin(self, trainer: Any) -> None:
        """An epoch begins."""

    def on_epoch_end(self, trainer: Any) -> None:
        """An epoch has ended."""

    def on_step_begin(self, trainer: Any) -> None:
        """A step begins."""

    def on_step_end(self, trainer: Any) -> None:
        """A step has ended; ``trainer.metrics`` are its own."""

    def lightning_callbacks(self, trainer: TrainerView) -> list[pl.Callback]:
        """Lightning callbacks that this one stands for; they join the trainer when a fit is set up."""
        return []

    @property
    def setup(self) -> Any:
        """The hook that Lightning would call; this is not one of its callbacks.

        Raises:
            TypeError: Always.
        """
        name = type(self).__name__
        raise TypeError(f"{name} is a callback of the six-hook style; give the trainer CallbackList([{name}(…)])")

    state_key = on_exception = setup
