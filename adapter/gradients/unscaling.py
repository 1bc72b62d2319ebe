"""Scales a backward call and gives every gradient back in true units, before anybody accumulates or reads it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..discovery.discover import Discovered
from .precision import TrueUnitScaler
from .unscaled_hooks import RetainedGradients, TrueUnitHooks

__all__ = ["Unscaling"]

SEARCHED_CALLS = 4
"""Backward calls, of those from one place in the trainer's code, whose graph is searched for unknown leaves."""


class Unscaling:
    """Scaled backward calls with unscaled gradients.

    Inputs that a trainer differentiates by (an adversarial example) are leaves like parameters, new in every step. To
    walk the graph for them costs about a millisecond, so it is done on only when the first calls from some place found
    one, or the trainer called ``requires_grad_`` on one, hooked it or named it as an input of ``backward``.

    Sharded parameters are not leaves: FSDP adds the reduced gradient to theirs behind autograd's back. What they had is
    taken away for the length of the call, and the new gradient is unscaled before it is added to that.

    Args:
        scaler: Its scale is used; its growth and its skipping are not touched here.
        discovered: The optimizers' parameters are unscaled in every call.
    """

    def __init__(self, scaler: TrueUnitScaler, discovered: Discovered) -> None:
        self._scaler = scaler
        self._discovered = discovered
        self._hooked: dict[int, Tensor] = {}
        self._updated = {id(tensor) for tensor in discovered.updated()}
        self._hooks = TrueUnitHooks(scaler)
        self._retained = RetainedGradients()
        self._searches: dict[tuple[int, ...], int] = {}
        self._has_visitors = False
        self._visiting: list[RemovableHandle] = []
        parameters = [p for found in discovered.modules for p in found.value.parameters()]
        self._sharded = [p for p in parameters if isinstance(p, DTensor)]
        self._whole = {id(p) for p in parameters if not isinstance(p, DTensor)}
        self._whole |= {id(found.value) for found in discovered.tensors}
        self._had: list[tuple[DTensor, Tensor | None]] = []

    @property
    def inverse_scale(self) -> Tensor | None:
        """What makes a gradient true that is computed now; None where it was not scaled."""
        return self._hooks.inverse_scale

    def tensor_hook(self, tensor: Tensor, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer's `hook` of `tensor`, as it is to be registered."""
        if not tensor.is_leaf:
            return self._hooks.tensor_hook(hook)
        self.expect(tensor)
        return hook

    def module_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer's `hook` of a module, as it is to be called in a backward."""
        return self._hooks.module_hook(hook)

    def expect(self, *tensors: Any) -> None:
        """The trainer will read the gradients of `tensors`, be they inside of the graph or leaves of it."""
        self._retained.add(tensors)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                self._has_visitors |= id(tensor) not in self._hooked and id(tensor) not in self._updated

    def begin(self, outputs: Any, grads: Any, inputs: Any = ()) -> Any:
        """The root gradients of a backward call by `inputs`, scaled; `end` must follow the call."""
        for parameter in self._discovered.updated():
            if id(parameter) not in self._hooked and parameter.requires_grad and not isinstance(parameter, DTensor):
                self._hooked[id(parameter)] = parameter
                _register_first(parameter, self._unscale)
        if inputs:
            self.expect(*inputs)
        if self._has_visitors or self._is_to_search():
            visitors = [
                leaf for leaf in _leaves(outputs) if id(leaf) not in self._hooked and not self._is_gathered(leaf)
            ]
            self._has_visitors = self._has_visitors or bool(visitors)
            self._visiting += [_register_first(leaf, self._unscale) for leaf in visitors]
        scaled = tuple(g if g is None else self._scaler.scale(g) for g in grads)
        self._hooks.begin(self._scaler.inverse_scale())
        self._retained.begin()
        self._had = [(p, p.grad) for p in self._sharded if p.requires_grad]
        for sharded, _ in self._had:
            sharded.grad = None
        return scaled

    def end(self) -> None:
        """The backward call has ended, or failed."""
        had, self._had = self._had, []
        inverse = self._hooks.inverse_scale
        if inverse is not None:
            _add_unscaled(had, inverse)
            self._retained.end(inverse)
        self._hooks.end()
        for handle in self._visiting:
            handle.remove()
        self._visiting.clear()

    def _is_to_search(self) -> bool:
        place = _place()
        searches = self._searches.get(place, 0)
        self._searches[place] = searches + 1 if searches < SEARCHED_CALLS else searches
        return searches < SEARCHED_CALLS

    def _is_gathered(self, leaf: Tensor) -> bool:
        """Whether `leaf` is one of the whole parameters that FSDP computes with in place of the sharded ones."""
        return bool(self._sharded) and isinstance(leaf, nn.Parameter) and id(leaf) not in self._whole

    def _unscale(self, grad: Tensor | None) -> Tensor | None:
        """Before accumulation; for torch.autograd.grad, whose loss is not scaled, there is nothing to undo.

        A function of the trainer's own may give a parameter no gradient.
        """
        inverse = self._hooks.inverse_scale
        return None if inverse is None or grad is None else grad * inverse.to(grad.device)


@torch.no_grad()
def _add_unscaled(had: list[tuple[DTensor, Tensor | None]], inverse_scale: Tensor) -> None:
    """Unscale what a backward call left in ``p.grad`` of each parameter, and add it to what was there before."""
    new = [p.grad.to_local() for p, _ in had if isinstance(p.grad, DTensor)]
    if new:
        torch._foreach_mul_(new, inverse_scale.to(new[0].device))
    for parameter, before in had:
        if before is None:
            continue
        if isinstance(parameter.grad, DTensor) and isinstance(before, DTensor):
            before.to_local().add_(parameter.grad.to_local())
        parameter.grad = before


def _place() -> tuple[int, ...]:
    """Where in the trainer's code a backward call comes from: the instructions that led to it, innermost first."""
    place: list[int] = []
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("genlight."):
            if place:
                break
        elif not name.startswith("torch."):
            place += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(place)


def _leaves(outputs: Any) -> Iterator[Tensor]:
    """The tensors that a backward from `outputs` accumulates gradients in."""
    stack = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        stack.extend(following for following, _ in node.next_functions)


def _register_first(parameter: Tensor, hook: Callable[[Tensor | None], Tensor | None]) -> RemovableHandle:
    """Register a gradient hook that runs before those of the trainer, which expect true units."""
    handle: RemovableHandle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._backward_hooks
    assert hooks is not None
    # The engine walks the underlying dict, which an OrderedDict's move_to_end leaves as it is.
    others = {key: other for key, other in hooks.items() if key != handle.id}
    hooks.clear()
    hooks[handle.id] = hook
    hooks.update(others)
    return handle
