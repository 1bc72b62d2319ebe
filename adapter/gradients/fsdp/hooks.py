"""Gradient hooks of a trainer on parameters that FSDP shards, which autograd never gives a gradient to.

A hook of ``register_hook`` sees, as under DDP, this rank's own gradient of the whole parameter. One of
``register_post_accumulate_grad_hook`` runs once the backward call has ended, with the gradient of all ranks.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["add", "add_after", "adopt_hooks", "after_accumulation", "resolve", "watch"]

Hook = Callable[..., Any]

_adopted: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

_hooks: Any = WeakIdKeyDictionary()
"""By sharded parameter, what ``register_hook`` was given."""
_after: Any = WeakIdKeyDictionary()
"""By sharded parameter, what ``register_post_accumulate_grad_hook`` was given."""


def adopt_hooks(module: nn.Module, name: str, before: Tensor) -> None:
    """Take over the hooks of `before`, which was the parameter `name` of `module`; their handles still remove them."""
    after = getattr(before, "_post_accumulate_grad_hooks", None)
    if before._backward_hooks or after:
        _adopted.setdefault(module, {})[name] = before._backward_hooks or OrderedDict(), after or OrderedDict()


def resolve(module: nn.Module, name: str) -> None:
    """The parameter `name` of `module` is the object that it will be in training."""
    adopted = _adopted.get(module, {}).pop(name, None)
    if adopted is not None:
        parameter = module._parameters[name]
        _hooks[parameter], _after[parameter] = adopted


def add(sharded: Tensor, hook: Hook) -> RemovableHandle:
    """In place of ``sharded.register_hook(hook)``."""
    return _added(_hooks.setdefault(sharded, OrderedDict()), hook)


def add_after(sharded: Tensor, hook: Hook) -> RemovableHandle:
    """In place of ``sharded.register_post_accumulate_grad_hook(hook)``."""
    return _added(_after.setdefault(sharded, OrderedDict()), hook)


def after_accumulation(sharded: Tensor) -> list[Hook]:
    """What is to be called with `sharded` after each backward call that gave it a gradient."""
    return list(_after.get(sharded, {}).values())


def watch(sharded: Tensor, gathered: Tensor, scale: Callable[[], tuple[Tensor, Tensor] | None]) -> None:
    """Have the hooks of `sharded` called with the gradients of `gathered`, from now on.

    Args:
        sharded: The parameter that the trainer sees.
        gathered: The whole one that modules compute with, always the same object.
        scale: What the loss is multiplied by, and the inverse; None where it is not scaled.
    """
    if gathered._backward_hooks or not gathered.requires_grad:
        return

    def call(gradient: Tensor) -> Tensor | None:
        hooks = list(_hooks.get(sharded, {}).values())
        if not hooks:
            return None
        factors = scale()
        true = gradient if factors is None else gradient * factors[1].to(gradient.device)
        for hook in hooks:
            result = hook(true)
            true = true if result is None else result
        return true if factors is None else true * factors[0].to(gradient.device)

    gathered.register_hook(call)  # type: ignore[no-untyped-call]


def _added(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
