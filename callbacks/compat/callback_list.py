"""The list that runs callbacks of the six-hook style under Lightning, or in your own loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ..hook.events import callbacks_of, fire, is_number, run_state_of
from ..hook.hook import Hook, order_callbacks
from ..job_progress import JobProgress
from ..other_styles import StyleAdapter, forwarding_hook, require_events
from .named import HOOKS, Callback, CheckpointCallback, LoggingCallback, TakesView
from .trainer_view import TrainerView, view_of


class CallbackList(Hook):
    """Calls its callbacks in order; it is a Lightning callback that works in any ``Trainer``.

    You can also call it from your own loop: each of the six methods takes your trainer object and passes it on.
    `OwnLoop` lists the attributes of that object that the callbacks of this package use.

    Args:
        callbacks: Callbacks of the six-hook style, and Lightning callbacks; all join those of the trainer when a fit
            is set up.
        defaults: Whether to add a `LoggingCallback`, and a `CheckpointCallback` if the trainer has no other checkpoint
            callback.

    Raises:
        TypeError: Something in `callbacks` has none of the six hooks, or is a trainer hook.
    """

    critical = True
    ranks = "all"

    def __init__(self, callbacks: Sequence[Callback | pl.Callback] = (), *, defaults: bool = True) -> None:
        self.defaults = defaults
        self.callbacks: list[Any] = []
        self._joined: list[pl.Callback] = []
        self._view: TrainerView | None = None
        self._own_loop: Any = None
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
            callback = each if isinstance(each, pl.Callback) else _Adapter(each, place, view)
            if isinstance(each, CheckpointCallback) and view.own is None:
                callback = each.in_a_fit(view)
            is_second_progress = shows_progress and isinstance(callback, JobProgress)
            if callback not in present and not is_second_progress:
                self._joined.append(callback)
        # This list comes before its callbacks, because they read what it notes of a step. Checkpoints come last.
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
        if not self.defaults or view.own is not None:
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

    # The six hooks, for your own loop to call. Lightning and genlight call two of these names too, with a module.

    def on_train_begin(self, trainer: Any) -> None:
        """Training begins; a loop that does not call this begins with its first step."""
        loop: Any = OwnLoop(trainer, self)
        self._own_loop = loop
        run_state_of(loop).run_id = str(loop.find("run_id", ""))
        self.setup(loop, loop.lightning_module, "fit")
        fire(loop, "on_train_start")

    def on_epoch_begin(self, trainer: Any) -> None:
        """An epoch begins."""
        fire(self._loop_of(trainer), "on_train_epoch_start")

    def on_step_begin(self, trainer: Any) -> None:
        """A step begins; only callbacks of the six-hook style have a hook for it."""
        loop = self._loop_of(trainer)
        for callback in self._joined:
            if isinstance(callback, _Adapter):
                callback.on_train_batch_start(loop, loop.lightning_module, None, 0)

    def on_step_end(self, trainer: Any) -> None:
        """A step has ended."""
        loop = self._loop_of(trainer)
        loop.steps += 1
        metrics = loop.callback_metrics
        fire(loop, "on_metrics", {name: float(value) for name, value in metrics.items()}, loop.global_step)
        fire(loop, "on_train_batch_end", metrics, None, loop.steps - 1)

    @override
    def on_epoch_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            fire(self._loop_of(trainer), "on_train_epoch_end")

    @override
    def on_train_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            fire(self._loop_of(trainer), "on_train_end")

    def _loop_of(self, trainer: Any) -> Any:
        if self._own_loop is None or self._own_loop.own is not trainer:
            self.on_train_begin(trainer)
        return self._own_loop


class _Adapter(StyleAdapter):
    """Calls the six hooks of a callback, under its policy; in your own loop, its exceptions reach that loop."""

    def __init__(self, callback: Any, place: int, view: TrainerView) -> None:
        critical = view.own is not None or bool(getattr(callback, "critical", False))
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
        view = view_of(trainer, pl_module)
        return view if view.own is None or isinstance(self.callback, TakesView) else view.own

    on_train_start = forwarding_hook("on_train_begin")
    on_train_end = forwarding_hook("on_train_end")
    on_train_epoch_start = forwarding_hook("on_epoch_begin")
    on_train_epoch_end = forwarding_hook("on_epoch_end")
    on_train_batch_start = forwarding_hook("on_step_begin")
    on_train_batch_end = forwarding_hook("on_step_end")


class _Module(pl.LightningModule):
    """The module that holds the model of the loop."""

    def __init__(self, trainer: Any, model: Any) -> None:
        super().__init__()
        self.contract_state = trainer
        if isinstance(model, torch.nn.Module):
            self.model = model


class OwnLoop:
    """The attributes of a Lightning trainer that callbacks use, for the trainer object of your own loop.

    They come from that object, or from its ``state``: ``global_step`` (completed steps, counted if there is none),
    ``metrics`` (a mapping; otherwise ``loss``), ``model``, ``optimizer``, ``epoch``, ``max_steps`` or ``total_steps``,
    ``output_dir`` and ``run_id``. To end training, callbacks set its ``should_stop``; your loop checks it after each
    step.

    Args:
        own: That object, of any class.
        callbacks: The list by which callbacks hear of the loop; it adds them when it is set up.
    """

    world_size, is_global_zero, distributed_sampler_kwargs = 1, True, None
    max_epochs = -1
    enable_validation = True  # a callback that waits for a score keeps waiting
    lr_scheduler_configs, precision_plugin = (), None

    def __init__(self, own: Any, callbacks: CallbackList) -> None:
        self.own = own
        self.callbacks: list[pl.Callback] = [callbacks]
        self.loggers: list[Any] = []
        self.steps = 0
        self.lightning_module = _Module(own, self.find("model"))
        parameter = next(self.lightning_module.parameters(), torch.empty(0))
        self.strategy = SimpleNamespace(root_device=parameter.device)
        self.default_root_dir = self.find("output_dir", ".")

    def find(self, name: str, default: Any = None) -> Any:
        """An attribute of the trainer object, or of its ``state``; `default` if neither has it."""
        values = (getattr(holder, name, None) for holder in (self.own, getattr(self.own, "state", None)))
        return next((value for value in values if value is not None), default)

    @property
    def global_step(self) -> int:
        """Completed steps: the trainer's own number, otherwise the steps since this object was made."""
        return int(self.find("global_step", self.steps))

    @property
    def current_epoch(self) -> int:
        """Completed epochs."""
        return int(self.find("epoch", 0))

    @property
    def max_steps(self) -> int:
        """The step after which training ends; -1 if it is unknown."""
        return int(self.find("max_steps", self.find("total_steps", -1)))

    @property
    def optimizers(self) -> list[Any]:
        """Its optimizer."""
        optimizer = self.find("optimizer")
        return [] if optimizer is None else [optimizer]

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The metrics of the last step; only its loss if there is no mapping of metrics."""
        named = self.find("metrics")
        metrics = named if isinstance(named, Mapping) else {"loss": self.find("loss")}
        return {str(name): torch.as_tensor(value) for name, value in metrics.items() if is_number(value)}

    progress_bar_metrics = callback_metrics

    @property
    def should_stop(self) -> bool:
        """Whether training is to end."""
        return bool(self.find("should_stop", False))

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.own.should_stop = value
