"""The list that runs callbacks of the six-hook style under Lightning, or in a loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ..hook.events import callbacks_of, fire
from ..hook.hook import Hook, judge, order_callbacks, report_failures
from ..job_progress import JobProgress
from .named import HOOKS, Callback, CheckpointCallback, LoggingCallback, TakesView
from .own_loop import OwnLoop
from .trainer_view import TrainerView, view_of

__all__ = ["CallbackList"]


class CallbackList(Hook):
    """Calls the six hooks of its callbacks in order, as a Lightning callback that works in any ``Trainer``.

    You can also call it from your own loop: each of the six methods takes your trainer object and passes it on. What
    the callbacks of this package look at there is said in `own_loop`.

    Args:
        callbacks: Callbacks of the six-hook style, and Lightning callbacks, which join those of the trainer.
        defaults: Whether to add a `LoggingCallback`, and a `CheckpointCallback` if the trainer has no other checkpoint
            callback, when a fit is set up.

    Raises:
        TypeError: Something in `callbacks` has none of the six hooks.
    """

    critical = True
    ranks = "all"

    def __init__(self, callbacks: Sequence[Callback | pl.Callback] = (), *, defaults: bool = True) -> None:
        self.defaults = defaults
        self.callbacks: list[Any] = []
        self._policies: list[_Policy] = []
        self._own_loop: Any = None
        for callback in callbacks:
            self.append(callback)

    def append(self, callback: Callback | pl.Callback) -> None:
        """Add a callback, behind the others; within a fit it counts from the next fit on.

        Raises:
            TypeError: It has none of the six hooks.
        """
        has_hooks = any(callable(getattr(callback, hook, None)) for hook in HOOKS)
        if isinstance(callback, type) or not (has_hooks or isinstance(callback, pl.Callback)):
            raise TypeError(f"Invalid callback {callback!r}. Expected an object with some of {', '.join(HOOKS)}.")
        self.callbacks.append(callback)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        view = view_of(trainer, pl_module)
        hosted = [*self.callbacks, *self._missing(view)]
        self._policies = [_Policy(each) for each in hosted if not isinstance(each, pl.Callback)]
        present = callbacks_of(trainer)
        joining: list[pl.Callback] = []
        for callback in hosted:
            stands_for = callback.checkpoint_of(view) if isinstance(callback, CheckpointCallback) else callback
            is_second_bar = isinstance(stands_for, JobProgress) and any(isinstance(p, JobProgress) for p in present)
            if isinstance(stands_for, pl.Callback) and stands_for not in present and not is_second_bar:
                joining.append(stands_for)
        # Checkpoints come last, as in Lightning.
        joining.sort(key=lambda callback: isinstance(callback, pl.callbacks.Checkpoint))
        others = [each for each in joining if not isinstance(each, pl.callbacks.Checkpoint)]
        trainer.callbacks = [*others, *present, *joining[len(others) :]]  # type: ignore[attr-defined]
        order_callbacks(trainer)
        for callback in joining:
            callback.setup(trainer, pl_module, stage)

    def _missing(self, view: TrainerView) -> list[Any]:
        if not self.defaults or view.own is not None:
            return []
        logs = any(isinstance(callback, LoggingCallback) for callback in self.callbacks)
        saves = any(isinstance(callback, CheckpointCallback) for callback in self.callbacks)
        return [
            *([] if logs else [LoggingCallback()]),
            *([] if saves or view.checkpoint_callbacks else [CheckpointCallback()]),
        ]

    def _call(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        view = view_of(trainer, pl_module)
        for policy in self._policies:
            policy.call(hook, view)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._call("on_train_begin", trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._call("on_epoch_begin", trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._call("on_step_begin", trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        view = view_of(trainer, pl_module)
        view.step_ended(outputs)
        self._call("on_step_end", trainer, pl_module)
        if view.stop_vote.is_due(trainer):
            view.stop_vote.agree(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._call("on_epoch_end", trainer, pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for policy in self._policies:
            report_failures(policy)

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {key: callback.state_dict() for key, callback in self._stateful()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, callback in self._stateful():
            if key in state_dict:
                callback.load_state_dict(state_dict[key])

    def _stateful(self) -> list[tuple[str, Any]]:
        """Callbacks of the six-hook style that have a state, by place and class."""
        return [
            (f"{place}: {type(callback).__qualname__}", callback)
            for place, callback in enumerate(self.callbacks)
            if hasattr(callback, "load_state_dict") and not isinstance(callback, pl.Callback)
        ]

    # The six hooks, called by a loop of one's own. Lightning and genlight call two of these names, with a module.

    def on_train_begin(self, trainer: Any) -> None:
        """Training begins; a loop that does not say so begins with its first step."""
        self._own_loop = OwnLoop(trainer, self).as_trainer
        fire(self._own_loop, "on_train_start")

    def on_epoch_begin(self, trainer: Any) -> None:
        """An epoch begins."""
        fire(self._loop_of(trainer), "on_train_epoch_start")

    def on_step_begin(self, trainer: Any) -> None:
        """A step begins, of which callbacks of the six-hook style alone hear."""
        loop = self._loop_of(trainer)
        self._call("on_step_begin", loop, loop.lightning_module)

    def on_step_end(self, trainer: Any) -> None:
        """A step has ended."""
        self._loop_of(trainer).step_ended()

    @override
    def on_epoch_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            fire(self._loop_of(trainer), "on_train_epoch_end")

    @override
    def on_train_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            fire(self._loop_of(trainer), "on_train_end")
        else:
            self._call("on_train_end", trainer, pl_module)

    def _loop_of(self, trainer: Any) -> Any:
        if self._own_loop is None or self._own_loop.own is not trainer:
            self.on_train_begin(trainer)
        return self._own_loop


class _Policy(Hook):
    """The policy of one callback of the list; what one raises in a loop of one's own reaches that loop."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.critical = bool(getattr(callback, "critical", False))
        self.ranks = getattr(callback, "ranks", "zero")
        self.methods = {hook for hook in HOOKS if getattr(type(callback), hook, None) is not getattr(Callback, hook)}

    @property
    @override
    def label(self) -> str:
        return type(self.callback).__name__

    def call(self, hook: str, view: TrainerView) -> None:
        """Call a hook of the callback, where it has it and hears of it on this rank."""
        if hook not in self.methods or (self.ranks == "zero" and not view.is_main_process):
            return
        takes_view = view.own is None or isinstance(self.callback, TakesView)
        try:
            getattr(self.callback, hook)(view if takes_view else view.own)
        except Exception as error:
            if view.own is not None:
                raise
            judge(self, hook, error)
