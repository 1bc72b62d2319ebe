"""The list that runs callbacks of the six-hook style under Lightning, or in a loop of one's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from ..hook.cadence import NEVER, Boundaries
from ..hook.events import callbacks_of
from ..hook.hook import Hook, order_callbacks, skippable
from ..hook.stand_in import StandIn
from .named import CheckpointCallback, LoggingCallback
from .own_loop import OwnLoop
from .six_hooks import HOOKS, Callback
from .trainer_view import TrainerView, view_of

__all__ = ["CallbackList"]

AGREE_EVERY = 10
"""How many steps apart ranks agree on a stop that one of them wants."""


class CallbackList(Hook):
    """Calls the six hooks of its callbacks in order, as a Lightning callback that works in any ``Trainer``.

    You can also call it from your own loop: each of the six methods takes your trainer object and passes it on. What
    the callbacks of this package look at there, and do, is said in `own_loop`.

    Args:
        callbacks: Callbacks of the six-hook style.
        defaults: Whether to add a `LoggingCallback`, and a `CheckpointCallback` if the trainer has no other checkpoint
            callback, when a fit is set up.

    Raises:
        TypeError: Something in `callbacks` has none of the six hooks, or is a Lightning callback; in a loop of one's
            own: one of them needs Lightning.
    """

    critical = True
    ranks: Literal["zero", "all"] = "all"

    def __init__(self, callbacks: Sequence[Callback] = (), *, defaults: bool = True) -> None:
        self.defaults = defaults
        self.callbacks: list[Any] = []
        self._adapters: list[pl.Callback] = []
        self._own_loop: OwnLoop | None = None
        self._votes = Boundaries(self, every=AGREE_EVERY)
        for callback in callbacks:
            self.append(callback)

    def append(self, callback: Callback) -> None:
        """Add a callback, behind the others; within a fit it counts from the next fit on.

        Raises:
            TypeError: It has none of the six hooks, or is a Lightning callback.
        """
        given: Any = callback
        name = type(callback).__name__
        if isinstance(given, pl.Callback):
            raise TypeError(f"{name} is a Lightning callback; give it to the trainer next to this list")
        if isinstance(given, type) or not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise TypeError(f"Invalid callback {callback!r}. Expected an object with some of {', '.join(HOOKS)}.")
        self.callbacks.append(callback)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._votes = Boundaries(self, trainer.global_step, every=AGREE_EVERY)
        present = [callback for callback in callbacks_of(trainer) if callback not in self._adapters]
        view = view_of(trainer, pl_module)
        hosted = [*self.callbacks, *self._missing(trainer)]
        self._adapters = [
            adapter
            for place, callback in enumerate(hosted)
            for adapter in (*_brought_by(callback, view), _Adapter(callback, _kind(callback, hosted[:place])))
        ]
        place = present.index(self)
        checkpoints = [adapter for adapter in self._adapters if isinstance(adapter, pl.callbacks.Checkpoint)]
        others = [adapter for adapter in self._adapters if adapter not in checkpoints]
        # This list comes after its callbacks: it looks at what they want. Checkpoints come last, as in Lightning.
        trainer.callbacks = [  # type: ignore[attr-defined]
            *present[:place],
            *others,
            *present[place:],
            *checkpoints,
        ]
        order_callbacks(trainer)
        for adapter in self._adapters:
            adapter.setup(trainer, pl_module, stage)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.world_size == 1:
            self.next_due_step = NEVER
            return
        if self._votes.crosses(trainer.global_step):
            wants_stop = view_of(trainer, pl_module).wants_stop
            if trainer.strategy.reduce_boolean_decision(wants_stop, all=False):
                trainer.should_stop = True

    # The six hooks, called by a loop of one's own. Lightning and genlight call two of these names, with a module.

    def _dispatch(self, hook: str, trainer: Any) -> None:
        if self._own_loop is None or self._own_loop.trainer is not trainer:
            self._own_loop = OwnLoop(trainer)
        if hook == "on_step_end":
            self._own_loop.step_ended()
        for callback in self.callbacks:
            if getattr(callback, "needs_lightning", False):
                raise TypeError(
                    f"{type(callback).__name__} needs a Lightning trainer, and this loop has none: leave it out, or "
                    "train with `Trainer(callbacks=[CallbackList([…])])`"
                )
            if (method := getattr(callback, hook, None)) is not None:
                method(self._own_loop if getattr(callback, "takes_own_loop", False) else trainer)

    on_train_begin = functools.partialmethod(_dispatch, "on_train_begin")
    on_epoch_begin = functools.partialmethod(_dispatch, "on_epoch_begin")
    on_step_begin = functools.partialmethod(_dispatch, "on_step_begin")
    on_step_end = functools.partialmethod(_dispatch, "on_step_end")

    @override
    def on_train_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            self._dispatch("on_train_end", trainer)

    @override
    def on_epoch_end(self, trainer: Any, pl_module: Any = None) -> None:
        if pl_module is None:
            self._dispatch("on_epoch_end", trainer)

    def _missing(self, trainer: pl.Trainer) -> list[Any]:
        if not self.defaults:
            return []
        missing: list[Any] = []
        if not any(isinstance(callback, LoggingCallback) for callback in self.callbacks):
            missing.append(LoggingCallback())
        saves = any(isinstance(callback, CheckpointCallback) for callback in self.callbacks)
        if not saves and not trainer.checkpoint_callbacks:
            missing.append(CheckpointCallback())
        return missing


def _brought_by(callback: Any, view: TrainerView) -> list[pl.Callback]:
    """The Lightning callbacks that a callback stands for."""
    brought: list[pl.Callback] = callback.lightning_callbacks(view) if isinstance(callback, Callback) else []
    return brought


def _kind(callback: Any, before: list[Any]) -> str:
    """The key of a callback's state: its class, and how many of it stand before."""
    same = sum(type(other) is type(callback) for other in before)
    return f"{type(callback).__module__}.{type(callback).__qualname__}" + (f"#{same}" if same else "")


class _Adapter(StandIn):
    """Calls the hooks that one callback of this style has, under its policy."""

    def __init__(self, callback: Any, kind: str) -> None:
        self._kind = kind
        self.critical = bool(getattr(callback, "critical", False))
        self.ranks: Literal["zero", "all"] = getattr(callback, "ranks", "zero")
        super().__init__(callback)

    @property
    @override
    def state_key(self) -> str:
        return self._kind

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = getattr(self.callback, "state_dict", dict)()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if hasattr(self.callback, "load_state_dict"):
            self.callback.load_state_dict(state_dict)

    @override
    def forwarded_hooks(self) -> Mapping[str, str]:
        own = {six: getattr(type(self.callback), six, None) for six in HOOKS}
        return {HOOKS[six]: six for six, method in own.items() if method not in (None, getattr(Callback, six))}

    @override
    def call(self, method: str, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        view = view_of(trainer, args[0])
        if method == "on_step_end":
            view.step_ended(args[1])
        getattr(self.callback, method)(view)
