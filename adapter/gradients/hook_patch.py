"""Where torch is touched for gradients that a trainer asks for by name: with a hook, to retain them, by a new leaf.

The methods for that are replaced for the length of a training whose loss is scaled, and put back after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import BackwardHook

from .torch_internals import WrappedHook, disable_dynamo

__all__ = ["HookTranslator", "patch", "restore"]

Hook = Callable[..., Any]


class HookTranslator(Protocol):
    """Undoes the scale of the loss for a trainer's hooks."""

    def tensor_hook(self, tensor: Tensor, hook: Hook) -> Hook:
        """What is registered in place of a hook of `tensor`."""

    def module_hook(self, hook: Hook) -> Hook:
        """What is called in place of a backward hook of a module."""

    def expect(self, *tensors: Any) -> None:
        """The trainer will read the gradients of `tensors`."""


_translator: Callable[[], HookTranslator | None] = lambda: None  # noqa: E731  # until `patch` says which
_found: list[Any] = []
"""What `patch` found in the place of each of its own; None where that was inherited."""


def patch(translator: Callable[[], HookTranslator | None]) -> None:
    """Route the methods in `_PATCHED` through what `translator` then returns; None leaves them alone."""
    global _translator
    _translator = translator
    _found[:] = [vars(owner).get(name) for owner, name, _ in _PATCHED]
    for owner, name, patched in _PATCHED:
        setattr(owner, name, patched)


def restore() -> None:
    """Leave torch as it was before `patch`."""
    for (owner, name, _), found in zip(_PATCHED, _found, strict=True):
        if found is None:
            delattr(owner, name)
        else:
            setattr(owner, name, found)


_register_hook: Callable[..., Any] = Tensor.register_hook
_retain_grad: Callable[..., Any] = Tensor.retain_grad
_requires_grad: Callable[..., Any] = Tensor.requires_grad_
_full_hooks: Callable[..., None] = BackwardHook.__init__
_old_hook: Callable[..., None] = WrappedHook.__init__


@functools.wraps(_register_hook)
def _patched_register_hook(self: Tensor, hook: Hook) -> Any:
    translator = _translator()
    return _register_hook(self, hook if translator is None else translator.tensor_hook(self, hook))


@functools.wraps(_retain_grad)
def _patched_retain_grad(self: Tensor) -> None:
    _retain_grad(self)
    translator = _translator()
    if translator is not None:
        translator.expect(self)


@functools.wraps(_requires_grad)
def _patched_requires_grad(self: Tensor, requires_grad: bool = True) -> Any:
    translator = _translator()
    if translator is not None and requires_grad:
        translator.expect(self)
    return _requires_grad(self, requires_grad)


@disable_dynamo  # which would warn of what it cannot trace
@functools.wraps(_full_hooks)
def _patched_full_hooks(self: Any, module: Any, hooks: list[Hook], pre_hooks: list[Hook]) -> None:
    translator = _translator()
    if translator is not None:
        hooks, pre_hooks = [[translator.module_hook(hook) for hook in some] for some in (hooks, pre_hooks)]
    _full_hooks(self, module, hooks, pre_hooks)


@disable_dynamo
@functools.wraps(_old_hook)
def _patched_old_hook(self: Any, hook: Hook, module: Any = None) -> None:
    """For ``register_backward_hook``; what has no module is the hook of something else."""
    translator = _translator()
    _old_hook(self, hook if translator is None or module is None else translator.module_hook(hook), module)


_PATCHED: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (Tensor, "register_hook", _patched_register_hook),
    (Tensor, "retain_grad", _patched_retain_grad),
    (Tensor, "requires_grad_", _patched_requires_grad),
    (BackwardHook, "__init__", _patched_full_hooks),
    (WrappedHook, "__init__", _patched_old_hook),
)
