"""Every name of torch that genlight replaces during a training, and the reason.

==============================================  ================================================  =====================
name                                            reason                                            checked by
==============================================  ================================================  =====================
``torch.autograd._engine_run_backward`` and     the common entry of ``Tensor.backward``,          `begin` and `end` of
``torch.autograd.graph._engine_run_backward``   ``autograd.backward`` and ``autograd.grad``,      each step, and
                                                also if a class imported these by name            `_prove` once
``optimizer.step`` of each managed optimizer    to skip an update, to average gradients before    ``test_router.py``
                                                it, and to wrap its closure
``optimizer.zero_grad`` on several ranks, or    to zero used gradients without a call for each,   ``test_router.py``,
if a callback has ``on_before_zero_grad``       and Lightning's hook                              ``test_averaging.py``
the class of each averaged parameter, during    only a class can have a property ``grad`` to      ``test_averaging.py``
a step, except in updates                       average gradients before they are read
==============================================  ================================================  =====================

A hook of torch, ``register_optimizer_step_pre_hook``, reports optimizers that are not managed, and steps that
``configure`` kept before they were replaced. FSDP 2 needs further replacements: see ``fsdp``. The entry of the engine
stays replaced during a complete training; calls between steps and in other threads pass through unchanged. Both of its
names are set, because ``torch.compiler._patch_engine_backward`` restores both to the value of the second.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...callbacks.lightning_internals import SUPPORTED
from .torch_internals import (
    current_graph_task_id,
    disabled_torch_function,
    engine_entry,
    engine_run_backward,
    keep_out_of_graphs,
    set_engine_run_backward,
)

_WITHOUT_GRAPHS = tuple(
    f"{__package__}.{name}"
    for name in (
        *("torch_hooks", "step", "step_part", "fp16", "update_guard"),
        *("lost_ranks", "rank_agreement", "rank_check"),
        *(f"ddp.{name}" for name in ("averaging", "buckets", "buffers")),
    )
)
"""Modules that torch.compile does not trace. They run in backward calls and updates, and never in a forward."""

run_backward = engine_run_backward
"""Torch's entry. Arguments: outputs, their gradients, then the other arguments of the engine."""

_GRAD: Any = Tensor.grad
read_gradient: Callable[[Tensor], Tensor | None] = _GRAD.__get__
write_gradient: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""Read and write a gradient without calling a `GradientGuard`."""


class Interceptor(Protocol):
    """Gets the calls of torch's entries, in the thread that called `begin` for it."""

    in_backward: bool
    """Whether one of its backward calls is running."""

    def backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward call of the trainer."""

    def grad(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of ``torch.autograd.grad``."""

    def within_backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of torch's engine within a backward call, as from a checkpointed segment."""

    def check_managed(self, optimizer: Optimizer) -> None:
        """Called before any optimizer makes a step."""


_active: dict[int, Interceptor] = {}
"""Interceptors of the threads in which a step runs, by thread."""
_lock = threading.Lock()
_holders: list[Interceptor] = []
_step_hook: RemovableHandle | None = None


def hold(interceptor: Interceptor) -> None:
    """Replace torch's entry until `release`, for many steps, since a replacement takes some 10 µs.

    Raises:
        RuntimeError: A backward call of this torch does not go through the replaced entry.
    """
    keep_out_of_graphs(*_WITHOUT_GRAPHS)
    with _lock:
        _holders.append(interceptor)
        _replace_or_restore()
    try:
        _prove()
    except BaseException:
        release(interceptor)
        raise


def release(interceptor: Interceptor) -> None:
    """Undo one `hold`; after the last one, restore torch's entry."""
    with _lock:
        _holders.remove(interceptor)
        _replace_or_restore()


def _replace_or_restore() -> None:
    """Replace torch's entry if an interceptor holds it; otherwise restore it."""
    global _step_hook
    if _holders:
        set_engine_run_backward(_intercept)
    if _holders and _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_before_any_step)
    elif not _holders and _step_hook is not None:
        set_engine_run_backward(run_backward)
        _step_hook.remove()
        _step_hook = None


def begin(interceptor: Interceptor) -> None:
    """Route the calls of this thread to `interceptor`; call `hold` before."""
    if engine_entry() is not _intercept:  # something restored torch's entry between two steps
        set_engine_run_backward(_intercept)
    _active[threading.get_ident()] = interceptor


def end() -> RuntimeError | None:
    """Stop intercepting the calls of this thread.

    Returns:
        The error to raise if something replaced our entry within the step, so that backward calls may have bypassed
        genlight; otherwise None.
    """
    _active.pop(threading.get_ident(), None)
    entry: Any = engine_entry()
    if entry is _intercept or not _holders:
        return None
    set_engine_run_backward(_intercept)
    return RuntimeError(
        f"torch.autograd._engine_run_backward was replaced by {entry.__module__}.{entry.__qualname__} in the middle of "
        "a step, so that gradients may have been neither averaged nor unscaled. Undo this replacement within the same "
        "step, or remove it."
    )


def is_active(interceptor: Interceptor) -> bool:
    """Whether the calls of this thread go to `interceptor`."""
    return _active.get(threading.get_ident()) is interceptor


def wrap(optimizer: Optimizer, name: str, through: Callable[..., Any]) -> None:
    """Route ``optimizer.<name>`` through ``through(optimizer, inner, …)``.

    The replacement is a bound method with the same attributes, since LR schedulers use these to count calls.
    """
    inner = getattr(optimizer, name)

    @functools.wraps(inner)
    def routed(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        return through(self, inner, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(routed, optimizer))


@functools.cache
def _prove() -> None:
    """Call backward and ``torch.autograd.grad`` once in this process, and check that both go through our entry."""
    seen: list[str] = []

    def make_note(name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            seen.append(name)
            return (None,)

        return call

    canary: Any = types.SimpleNamespace(in_backward=False, backward=make_note("backward"), grad=make_note("grad"))
    thread = threading.get_ident()
    before = _active.get(thread)
    _active[thread] = canary
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.ones((), device="cpu", requires_grad=True)
            (leaf * 1).backward()  # type: ignore[no-untyped-call]
            torch.autograd.grad(leaf * 1, leaf)
    finally:
        del _active[thread]
        if before is not None:
            _active[thread] = before
    if seen != ["backward", "grad"]:
        raise RuntimeError(
            f"torch {version('torch')} runs backward calls past the entry through which genlight routes them, so "
            f"that gradients would be neither averaged nor unscaled; install a release that genlight supports: "
            f"{SUPPORTED['torch']}"
        )


def _intercept(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace torch's entry: send the call to the interceptor of this thread, if there is one."""
    interceptor = _active.get(threading.get_ident())
    if interceptor is None and current_graph_task_id() != -1:  # in the thread that runs backward on a device
        interceptor = next((each for each in _active.values() if each.in_backward), None)
    if interceptor is None:
        return run_backward(outputs, grads, *args, **kwargs)
    if interceptor.in_backward:
        return interceptor.within_backward(outputs, grads, *args, **kwargs)
    # Only backward accumulates; torch.autograd.grad does not.
    if not kwargs.get("accumulate_grad"):
        return interceptor.grad(outputs, grads, *args, **kwargs)
    return interceptor.backward(outputs, grads, *args, **kwargs)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001  # torch's signature
    interceptor = _active.get(threading.get_ident())
    if interceptor is not None:
        interceptor.check_managed(optimizer)


class GradientGuard:
    """Calls a function before the gradient of a parameter is read, and another one before it is written.

    While a parameter is guarded, its class is a subclass of its original class; it stays the same object. A parameter
    of a custom class cannot be guarded.

    Args:
        on_read: Called with a parameter before its gradient is returned.
        on_write: Called with a parameter and its new gradient.
    """

    def __init__(self, on_read: Callable[[Tensor], None], on_write: Callable[[Tensor, Tensor | None], None]) -> None:
        self._on_read, self._on_write = on_read, on_write
        self._classes: dict[type, type[Any]] = {kind: self._subclass(kind) for kind in (nn.Parameter, Tensor)}
        self._parameters: Sequence[Tensor] | None = None
        self._guarded: dict[type, list[Tensor]] = {}
        self._is_on = False

    def guard(self, parameters: Sequence[Tensor]) -> bool:
        """Guard `parameters`; return False if one of them cannot be guarded. Pass the same list until they change."""
        if parameters is not self._parameters:
            self.unguard()
            self._parameters = parameters
            kinds = {type(p) for p in parameters}
            can_be_guarded = kinds <= self._classes.keys()
            self._guarded = {k: [p for p in parameters if type(p) is k] for k in kinds} if can_be_guarded else {}
        if not self._is_on:
            for kind, guarded in self._guarded.items():
                own = self._classes[kind]
                for parameter in guarded:
                    parameter.__class__ = own
            self._is_on = True
        return bool(self._guarded) or not parameters

    def unguard(self) -> None:
        """Restore the classes of the parameters."""
        for kind, guarded in self._guarded.items():
            for parameter in guarded:
                parameter.__class__ = kind
        self._is_on = False

    def _subclass(self, kind: type[Any]) -> type[Any]:
        """Return a subclass of `kind` whose property ``grad`` calls `on_read` and `on_write`."""

        def read(tensor: Any) -> Any:
            self._on_read(tensor)
            return read_gradient(tensor)

        def write(tensor: Any, value: Any) -> None:
            self._on_write(tensor, value)
            write_gradient(tensor, value)

        def as_plain(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def called(tensor: Any, argument: Any) -> Any:
                self._on_read(tensor)
                tensor.__class__, self._is_on = kind, False  # `guard` sets the subclass again
                return call(tensor, argument)

            return called

        members = {
            "grad": property(read, write),
            # So that copies and pickles of guarded tensors have the original class.
            "__deepcopy__": as_plain(copy.deepcopy),
            "__reduce_ex__": as_plain(lambda tensor, protocol: tensor.__reduce_ex__(protocol)),
            # So that results of operations on guarded tensors have the class that torch gives them.
            "__torch_function__": disabled_torch_function,
        }
        return type(kind.__name__, (kind,), members)
