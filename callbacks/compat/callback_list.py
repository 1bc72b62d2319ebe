"""The list that runs callbacks of the six-hook style under Lightning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ..hook.events import callbacks_of
from ..hook.hook import Hook, order_callbacks
from ..job_progress import JobProgress
from ..other_styles import StyleAdapter, forwarding_hook, require_events
from .named import HOOKS, Callback, CheckpointCallback, LoggingCallback, NeedsFit
from .trainer_view import TrainerView, view_of


class CallbackList(Hook):
    """Calls its callbacks in order; it is a Lightning callback that works in any ``Trainer``.

    Your own loop can call its six methods: each takes your trainer object and passes it to your callbacks, whose
    exceptions reach the loop. Callbacks of this package and of Lightning need a fit.

    Args:
        callbacks: Callbacks of the six-hook style, and Lightning callbacks; all join those of the trainer when a fit
            is set up.
        defaults: Whether to add a `LoggingCallback`, and a `CheckpointCallback` if the trainer has no other checkpoint
            callback.

    Raises:
        TypeError: Something in `callbacks` has none of the six hooks, or is a trainer hook. In your own loop: a
            callback needs a fit.
    """

    critical = True
    ranks = "all"

    def __init__(self, callbacks: Sequence[Callback | pl.Callback] = (), *, defaults: bool = True) -> None:
        self.defaults = defaults
        self.callbacks: list[Any] = []
        self._joined: list[pl.Callback] = []
        self._view: TrainerView | None = None
        for callback in callbacks:
            self.append(callback)

    def append(self, callback: Any) -> None:
        """Add a callback, a `Callback` or one of Lightning's, after the others; during a fit, for the next fit.

        Raises:
            TypeError: It has none of the six hooks, or is a trainer hook.
        """
        if not isinstance(callback, pl.Callback):
            require_events("callback", callback, HOOKS, Callback)
        self.callbacks.append(callback)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        view = self._view = view_of(trainer, pl_module)
        present = [each for each in callbacks_of(trainer) if each not in self._joined]
        trainer.callbacks = present  # type: ignore[attr-defined]
        shows_progress = any(isinstance(each, JobProgress) for each in present)
        self._joined = []
        for place, each in enumerate([*self.callbacks, *self._missing(view)]):
            callback = each if isinstance(each, pl.Callback) else _Adapter(each, place)
            is_second_progress = shows_progress and isinstance(callback, JobProgress)
            if callback not in present and not is_second_progress:
                self._joined.append(callback)
        # This list comes before its callbacks: it updates the `TrainerView` that they read. Checkpoints come last.
        place = present.index(self) + 1
        checkpoints = [each for each in self._joined if isinstance(each, pl.callbacks.Checkpoint)]
        others = [each for each in self._joined if each not in checkpoints]
        trainer.callbacks = [*present[:place], *others, *present[place:], *checkpoints]  # type: ignore[attr-defined]
        order_callbacks(trainer)
        for callback in self._joined:
            callback.setup(trainer, pl_module, stage)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._view is None else {"best_loss": self._view.best_loss}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._view is not None:
            self._view.best_loss = state_dict.get("best_loss", math.inf)

    def _missing(self, view: TrainerView) -> list[Any]:
        if not self.defaults:
            return []
        logs = any(isinstance(callback, LoggingCallback) for callback in self.callbacks)
        saves = any(isinstance(callback, CheckpointCallback) for callback in self.callbacks)
        return [
            *([] if logs else [LoggingCallback()]),
            *([] if saves or view.checkpoint_callbacks else [CheckpointCallback()]),
        ]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        view = view_of(trainer, pl_module)
        view.step_ended(outputs)
        if view.stop_vote.is_due(trainer):
            view.stop_vote.agree(trainer)

    # The six hooks, for your own loop to call. Lightning and genlight also call the last two, with a module.

    def on_train_begin(self, trainer: Any) -> None:
        """Training begins."""
        self._call("on_train_begin", trainer)

    def on_epoch_begin(self, trainer: Any) -> None:
        """An epoch begins."""
        self._call("on_epoch_begin", trainer)

    def on_step_begin(self, trainer: Any) -> None:
        """A step begins."""
        self._call("on_step_begin", trainer)

    def on_step_end(self, trainer: Any) -> None:
        """A step has ended."""
        self._call("on_step_end", trainer)

    @override
    def on_epoch_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            self._call("on_epoch_end", trainer)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            self._call("on_train_end", trainer)

    def _call(self, hook: str, trainer: Any) -> None:
        for callback in self.callbacks:
            if isinstance(callback, pl.Callback | NeedsFit):
                name = type(callback).__name__
                raise TypeError(
                    f"{name} cannot run in your own loop, only in a fit of Lightning's Trainer. Take it out of the "
                    "CallbackList, or put the loop's step into a trainer class or a LightningModule"
                )
            if hasattr(callback, hook):
                getattr(callback, hook)(trainer)


class _Adapter(StyleAdapter):
    """Calls the six hooks of a callback, under its policy."""

    def __init__(self, callback: Any, place: int) -> None:
        critical = bool(getattr(callback, "critical", False))
        super().__init__(callback, critical=critical, ranks=getattr(callback, "ranks", "zero"))
        self._place = place

    @property
    @override
    def state_key(self) -> str:
        return f"callback {self._place} of the list: {type(self.callback).__qualname__}"

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = getattr(self.callback, "state_dict", dict)()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if hasattr(self.callback, "load_state_dict"):
            self.callback.load_state_dict(state_dict)

    @override
    def argument(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
        return view_of(trainer, pl_module)

    on_train_start = forwarding_hook("on_train_begin")
    on_train_end = forwarding_hook("on_train_end")
    on_train_epoch_start = forwarding_hook("on_epoch_begin")
    on_train_epoch_end = forwarding_hook("on_epoch_end")
    on_train_batch_start = forwarding_hook("on_step_begin")
    on_train_batch_end = forwarding_hook("on_step_end")
