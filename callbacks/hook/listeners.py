"""Which callbacks a loop calls in each step, and which of them it may leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import lightning.pytorch as pl

from .events import callbacks_of
from .hook import Hook

__all__ = [
    "listeners",
    "skippable",
    "skipping_hook",
]

_SKIPPABLE_ATTRIBUTE = "_genlight_is_skippable"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def listeners(trainer: pl.Trainer, event: str) -> list[Callable[..., Any]]:
    """The method `event` of every callback that has one of its own, to be called in each step.

    Hooks that do not listen on this rank are left out.
    """
    return [
        getattr(callback, event)
        for callback in callbacks_of(trainer)
        if _is_own(callback, event)
        and (not isinstance(callback, Hook) or callback.ranks == "all" or trainer.is_global_zero)
    ]


def skippable(method: _Method) -> _Method:
    """Mark an ``on_train_batch_end`` that has nothing to do before ``self.next_due_step``, which it sets at each call.

    genlight's loop does not call it before that step: a call that finds nothing to do still costs a step some 2 µs, as
    its code has left the processor's caches since the last one; without this, the callbacks of a job would take 28 µs
    instead of 12. It does call it at the first step of an epoch, and once
    a stop was asked for. A hook that an event gives something to do sets ``next_due_step`` to 0. Lightning's own loop
    calls it after every step. A method that a subclass puts in its place is not skipped unless it is marked as well.
    """
    setattr(method, _SKIPPABLE_ATTRIBUTE, True)
    return method


def skipping_hook(listener: Callable[..., Any]) -> Hook | None:
    """The hook whose ``next_due_step`` says when to call `listener`; None where it is called after each step."""
    hook = getattr(listener, "__self__", None)
    return hook if isinstance(hook, Hook) and hasattr(listener, _SKIPPABLE_ATTRIBUTE) else None


def _is_own(callback: pl.Callback, event: str) -> bool:
    plain = {getattr(pl.Callback, event, None), getattr(Hook, event), None}
    return event in vars(callback) or getattr(type(callback), event, None) not in plain
