"""While a scaled backward runs, hooks inside of the graph see true units, and what they return gets its scale back.

That holds for hooks of activations and of modules, and for what ``retain_grad`` keeps. Out of reach, and scaled as with
any gradient scaler, are the ``backward`` of a ``torch.autograd.Function``, hooks of a ``tensor.grad_fn``, and what is
registered in compiled code. Where one of these compares a gradient with a constant, use bf16-mixed.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .precision import TrueUnitScaler

__all__ = ["RetainedGradients", "TrueUnitHooks"]

log = logging.getLogger(__name__)

Hook = Callable[..., Any]


class TrueUnitHooks:
    """Wraps hooks so that they need not know the scale.

    A gradient in fp16 is given in fp32: without its scale it may be too small for fp16, which is why there is one.

    Args:
        scaler: What hooks return is scaled by it.
    """

    def __init__(self, scaler: TrueUnitScaler) -> None:
        self._scaler = scaler
        self._inverse_scale: Tensor | None = None
        self._thread = threading.local()

    def begin(self, inverse_scale: Tensor) -> None:
        """A backward call begins whose gradients are true when multiplied by `inverse_scale`."""
        self._inverse_scale = inverse_scale

    def end(self) -> None:
        """The backward call has ended, or failed."""
        self._inverse_scale = None

    @property
    def inverse_scale(self) -> Tensor | None:
        """What makes a gradient true that is computed now, in this thread; None where it was not scaled.

        So it is outside of backward calls, and in what a hook differentiates itself: it starts from true units.
        """
        return None if getattr(self._thread, "in_hook", False) else self._inverse_scale

    def tensor_hook(self, hook: Hook) -> Hook:
        """`hook` of an activation, called as ``hook(gradient)``."""

        def call(gradient: Tensor) -> Any:
            inverse = self.inverse_scale
            if inverse is None:
                _warn_if_compiling()
                return hook(gradient)
            true = _in_true_units(gradient, inverse)
            result = self._result(hook, true)
            return self._scaled(true if result is None and _is_written(true) else result, gradient)

        return _wrapper(call, hook)

    def module_hook(self, hook: Hook) -> Hook:
        """`hook` of a module, called as ``hook(module, grad_input, grad_output)`` or ``hook(module, grad_output)``."""

        def call(module: Any, *gradients: tuple[Tensor | None, ...]) -> Any:
            inverse = self.inverse_scale
            if inverse is None:
                _warn_if_compiling()
                return hook(module, *gradients)
            true = [tuple(g if g is None else _in_true_units(g, inverse) for g in some) for some in gradients]
            result = self._result(hook, module, *true)
            if result is None and any(g is not None and _is_written(g) for g in true[0]):
                result = true[0]
            if not isinstance(result, tuple | list):
                return self._scaled(result, *gradients[0][:1])
            # As many as the hook returned: torch says what is wrong with a number that does not fit.
            given = [*gradients[0], *[None] * len(result)]
            return tuple(self._scaled(r, g) for r, g in zip(result, given, strict=False))

        return _wrapper(call, hook)

    def _result(self, hook: Hook, *args: Any) -> Any:
        self._thread.in_hook = True
        try:
            return hook(*args)
        finally:
            self._thread.in_hook = False

    def _scaled(self, result: Any, given: Tensor | None = None) -> Any:
        """What a hook returned, in the units and the type of the gradient that it was given."""
        if not isinstance(result, Tensor):
            return result
        scaled = self._scaler.scale(result)
        return scaled if given is None else scaled.to(given.dtype)


class RetainedGradients:
    """Gradients that ``retain_grad`` keeps inside of the graph.

    They are taken away for the length of a backward call, so that what is there after it is what it added.
    """

    def __init__(self) -> None:
        self._retaining = WeakIdKeyDictionary()
        self._had: list[tuple[Tensor, Tensor | None]] = []

    def add(self, tensors: Iterable[Any]) -> None:
        """Of `tensors` those inside of the graph retain their gradients from now on."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                self._retaining[tensor] = True

    def begin(self) -> None:
        """A backward call begins."""
        if not self._retaining:
            return
        self._had = [(tensor, tensor.grad if tensor.retains_grad else None) for tensor in self._retaining]
        for tensor, _ in self._had:
            tensor.grad = None

    def end(self, inverse_scale: Tensor) -> None:
        """The backward call has ended, or failed; what it added is true when multiplied by `inverse_scale`."""
        had, self._had = self._had, []
        for tensor, before in had:
            if not tensor.retains_grad or tensor.grad is None:
                tensor.grad = before
                continue
            true = _in_true_units(tensor.grad, inverse_scale).to(tensor.dtype)
            tensor.grad = true if before is None else before + true


def _in_true_units(gradient: Tensor, inverse_scale: Tensor) -> Tensor:
    """A copy in true units, in a type that can hold them."""
    wide = gradient.float() if gradient.dtype is torch.float16 else gradient
    return wide * inverse_scale.to(gradient.device)


def _is_written(fresh: Tensor) -> bool:
    """Whether a hook wrote to the tensor that was made for it."""
    return fresh._version > 0


def _warn_if_compiling() -> None:
    if torch.compiler.is_compiling():
        log.warning(
            "torch.compile takes a gradient hook into a graph, where gradients have the scale of 16-mixed. A hook that "
            "compares them with a constant, as clamping does, has to be registered outside of compiled code."
        )


def _wrapper(call: Hook, hook: Hook) -> Hook:
    """`call` under the name of `hook`; but that itself where torch shards modules by it, which asks for no units."""
    if str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
        return hook
    return functools.update_wrapper(call, hook, updated=())
