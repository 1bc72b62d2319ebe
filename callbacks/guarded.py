"""A failure and rank policy for callbacks from elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from typing_extensions import override

from .hook.hook import Hook, order_callbacks, report_failures
from .hook.stand_in import StandIn

__all__ = ["Guarded"]

_LAST = frozenset({"teardown", "on_exception"})


class Guarded(StandIn):
    """Gives any Lightning callback a policy: what becomes of its failures, and on which ranks it runs.

    Its state has the same key in checkpoints, with and without the guard. A callback that communicates with other
    ranks, or sets ``trainer.should_stop``, needs ``ranks="all"``.

    Args:
        callback: The callback.
        critical: Whether its exceptions end the run; otherwise they are logged once for each hook and counted.
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
        self.critical = critical
        self.ranks = ranks
        super().__init__(callback)

    @property
    @override
    def state_key(self) -> str:
        key: str = self.callback.state_key
        return key

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.callback.state_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.callback.load_state_dict(state_dict)

    @override
    def forwarded_hooks(self) -> Mapping[str, str]:
        own = {name for name in dir(type(self.callback)) if _is_own_hook(type(self.callback), name)}
        return {name: name for name in own | {"setup", *_LAST}}

    @override
    def call(self, method: str, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.callback, method)(trainer, *args, **kwargs)

    @override
    def deliver(self, method: str, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        if method == "setup":
            order_callbacks(trainer)
        try:
            return super().deliver(method, trainer, *args, **kwargs)
        finally:
            if method in _LAST:
                report_failures(self)


def _is_own_hook(callback: type[pl.Callback], name: str) -> bool:
    """Whether a callback overrides a hook, or has an event of ours that Lightning does not have."""
    is_hook = name.startswith("on_") or name in ("setup", "teardown")
    own = getattr(callback, name)
    return is_hook and inspect.isfunction(own) and own is not getattr(pl.Callback, name, None)
