"""A failure and rank policy for callbacks from elsewhere."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from typing_extensions import override

from .hook.events import is_rank_zero
from .hook.hook import Hook, judge, order_callbacks, report_failures

__all__ = ["Guarded"]

_OF_THE_STATE = frozenset({"on_save_checkpoint", "on_load_checkpoint"})
"""A failure of these must reach the code that saves or loads."""
_LAST = frozenset({"teardown", "on_exception"})


class Guarded(Hook):
    """Gives any Lightning callback a policy: what becomes of its failures, and on which ranks it runs.

    It has the hooks that `callback` overrides and no others, and its state under the same key, so that a checkpoint
    with and without the guard are one. A callback that talks to other ranks, or sets ``trainer.should_stop``, needs
    ``ranks="all"``.

    Args:
        callback: The callback.
        critical: Whether an exception of it ends the run; else it is logged once for each hook, counted, and summed up
            at the end.
        ranks: ``zero``, or ``all``.

    Raises:
        TypeError: `callback` is not a Lightning callback, has a policy of its own, or is one that the trainer must see
            itself (checkpoints, progress bars).
        ValueError: `ranks` is unknown.
    """

    def __init__(self, callback: pl.Callback, critical: bool = False, ranks: Literal["zero", "all"] = "zero") -> None:
        name = type(callback).__name__
        if isinstance(callback, Hook):
            raise TypeError(f"{name} has a policy of its own; set its `critical` and `ranks`")
        if isinstance(callback, Checkpoint | ProgressBar):
            raise TypeError(f"{name} cannot be guarded: Trainer looks for checkpoints and progress bars by their class")
        if not isinstance(callback, pl.Callback):
            raise TypeError(f"Invalid `callback`. Expected a Lightning callback, but received {callback!r}.")
        if ranks not in ("zero", "all"):
            raise ValueError(f"Invalid `ranks`. Expected 'zero' or 'all', but received {ranks!r}.")
        self.callback = callback
        self.critical = critical
        self.ranks = ranks
        self._take_over_hooks()

    @property
    @override
    def label(self) -> str:
        return type(self.callback).__name__

    @property
    @override
    def state_key(self) -> str:
        return self.callback.state_key

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.callback.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.callback.load_state_dict(state_dict)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if not isinstance(value, _Forwarded)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._take_over_hooks()

    def _take_over_hooks(self) -> None:
        """Have the hooks of the callback, and none that it has not: a hook that exists is called in each step."""
        for name in dir(type(self.callback)):
            plain = getattr(pl.Callback, name, None)
            is_hook = name.startswith("on_") or name in ("setup", "teardown")
            # Events of ours that Lightning does not have are forwarded, too.
            if is_hook and inspect.isfunction(own := getattr(type(self.callback), name)) and own is not plain:
                vars(self)[name] = _Forwarded(_forward, self, name)
        for name in ("setup", "teardown", "on_exception"):
            vars(self).setdefault(name, _Forwarded(_forward, self, name))


class _Forwarded(functools.partial[Any]):
    """A hook of the guarded callback, under the policy."""


def _forward(guard: Guarded, name: str, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
    if name == "setup":
        order_callbacks(trainer)
    if guard.ranks == "zero" and not is_rank_zero(trainer):
        return None
    try:
        return getattr(guard.callback, name)(trainer, *args, **kwargs)
    except Exception as error:
        if name in _OF_THE_STATE:
            raise
        judge(guard, name, error)
        return None
    finally:
        if name in _LAST:
            report_failures(guard)
