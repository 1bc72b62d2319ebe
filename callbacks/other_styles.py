"""Common code of the two other styles of callbacks, trainer hooks and six-hook callbacks: each has an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from typing_extensions import override

from .hook.hook import Hook, judge


class OtherStyle:
    """Base of callbacks of another style. If a user gives one directly to a trainer, the error names its adapter."""

    _style: ClassVar[str]
    """The style, in words."""
    _place: ClassVar[str]
    """Code that gives a callback of the style to a trainer; ``{}`` stands for the callback."""

    @property
    def setup(self) -> Any:
        """Lightning's hook of this name. It raises, because this is no Lightning callback.

        Raises:
            TypeError: Always.
        """
        name = type(self).__name__
        raise TypeError(f"{name} is {self._style}; give the trainer {self._place.format(f'{name}(…)')}")

    state_key = on_exception = setup


class StyleAdapter(Hook):
    """Runs a callback of another style under the policy of a `Hook`.

    Args:
        callback: The callback.
        critical: Whether a failure of it ends the run.
        ranks: The ranks that run it.
    """

    def __init__(self, callback: Any, *, critical: bool, ranks: Literal["zero", "all"]) -> None:
        self.callback = callback
        self.critical = critical
        self.ranks = ranks

    @property
    @override
    def label(self) -> str:
        return str(getattr(self.callback, "instance_name", type(self.callback).__name__))

    def argument(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
        """Return the argument that the methods of the callback take."""
        raise NotImplementedError

    def call_event(self, event: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call the method `event` of the callback, if it has one; a failure does not affect other events."""
        method = getattr(self.callback, event, None)
        if method is not None:
            try:
                method(self.argument(trainer, pl_module))
            except Exception as error:  # noqa: BLE001  # the policy raises it again
                judge(self, event, error)


def forwarding_hook(event: str) -> Any:
    """Return a hook of a `StyleAdapter` that calls the method `event` of its callback."""

    def call(self: StyleAdapter, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.call_event(event, trainer, pl_module)

    return call


def require_events(name: str, callback: Any, events: Sequence[str], base: type) -> None:
    """Refuse the argument `name` if it is a class, has none of the `events`, or is a callback of another style.

    Raises:
        TypeError: The argument is one of these; for another style, the message names the adapter of that style.
    """
    own = [each for each in events if getattr(type(callback), each, None) is not getattr(base, each)]
    if isinstance(callback, type) or not any(callable(getattr(callback, each, None)) for each in own):
        names = ", ".join(events)
        raise TypeError(f"Invalid `{name}` {callback!r}. Expected an object with one of the events {names}.")
    if not isinstance(callback, base):
        getattr(callback, "state_key", None)  # `OtherStyle.state_key` raises the error that names the adapter
