"""The base of hooks that stand in for a callback which is none of genlight's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from .hook import Hook, judge

__all__ = ["StandIn"]


class StandIn(Hook):
    """Calls the hooks that one callback has, and no others: a hook that exists is called in each step.

    A subclass says which hooks those are (`forwarded_hooks`) and how each is called (`call`).

    Args:
        callback: What it stands in for.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self._take_over_hooks()

    def forwarded_hooks(self) -> Mapping[str, str]:
        """The hooks of this object, each with the name of the callback's method that it stands for."""
        raise NotImplementedError

    def call(self, method: str, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the callback."""
        raise NotImplementedError

    def deliver(self, method: str, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the callback under the policy of this object."""
        if self.ranks == "zero" and not trainer.is_global_zero:
            return None
        try:
            return self.call(method, trainer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the policy raises it again
            judge(self, method, error)
            return None

    @property
    @override
    def label(self) -> str:
        return type(self.callback).__name__

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if not isinstance(value, _Forwarded)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._take_over_hooks()

    def _take_over_hooks(self) -> None:
        hooks = self.forwarded_hooks().items()
        vars(self).update({name: _Forwarded(self.deliver, method) for name, method in hooks})


class _Forwarded(functools.partial[Any]):
    """A hook of the callback, under the policy; a copy makes its own."""
