"""Every name of torch that is replaced while a trainer trains, and why.

==============================================  ================================================  =====================
what                                            why                                               noticed by
==============================================  ================================================  =====================
``torch.autograd._engine_run_backward`` and     the one entry of ``Tensor.backward``,             `begin` and `end` of
``torch.autograd.graph._engine_run_backward``   ``autograd.backward`` and ``autograd.grad``,      each step, and
                                                also where a class imported those by name         `_prove` once
``optimizer.step`` of each managed optimizer    an update is left out, or gradients averaged      ``test_router.py``
                                                before it, and its closure sees its arguments
``optimizer.zero_grad``, where a callback has   Lightning's hook                                  ``test_router.py``
``on_before_zero_grad``
the class of each averaged parameter, from a    only a class can have a property ``grad``: who    ``test_averaging.py``
step's begin to its end, but in updates         reads or writes one has gradients averaged
==============================================  ================================================  =====================

Optimizers that are not managed are seen by a step hook of torch's own, ``register_optimizer_step_pre_hook``. What FSDP
2 replaces beside these is in ``fsdp``. The entry of the engine is replaced while it is held, for a whole training:
calls between steps and of other threads go straight through. Both of its names are
set, because ``torch.compiler._patch_engine_backward`` puts back at both what it found at the second.
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

__all__ = [
    "GradientGuard",
    "Interceptor",
    "begin",
    "end",
    "hold",
    "is_active",
    "read_gradient",
    "release",
    "run_backward",
    "wrap",
    "write_gradient",
]

_WITHOUT_GRAPHS = tuple(
    f"{__package__}.{name}"
    for name in (
        *("torch_hooks", "step", "step_part", "changed_gradients", "fp16", "rank_check", "update_guard"),
        *(f"ddp.{name}" for name in ("averaging", "buckets", "buffers", "parameters")),
    )
)
"""Modules that run in a trainer's backward calls and updates; none that its forward calls, which has to be traced."""

run_backward = engine_run_backward
"""Torch's own entry: outputs, their gradients, then what the engine takes."""

_GRAD: Any = Tensor.grad
read_gradient: Callable[[Tensor], Tensor | None] = _GRAD.__get__
write_gradient: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""Read and write the gradient behind ``tensor.grad``, past a `GradientGuard`."""


class Interceptor(Protocol):
    """Called in place of torch's entries, in the thread that began it."""

    in_backward: bool
    """Whether one of its backward calls is running."""

    def backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        """A backward call of the trainer."""

    def grad(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of ``torch.autograd.grad``."""

    def within_backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """A call inside of a backward call, as of a checkpoint or an adjoint."""

    def check_managed(self, optimizer: Optimizer) -> None:
        """Any optimizer is about to step."""


_active: dict[int, Interceptor] = {}
"""By thread, of those in which a step runs."""
_lock = threading.Lock()
_holders: list[Interceptor] = []
_step_hook: RemovableHandle | None = None


def hold(interceptor: Interceptor) -> None:
    """Replace torch's entry until `release`, which may come many steps later: replacing it costs some 10 µs.

    Raises:
        RuntimeError: A backward call of this torch does not come through the entry that was replaced.
    """
    keep_out_of_graphs(*_WITHOUT_GRAPHS)
    with _lock:
        _holders.append(interceptor)
        _replace_or_put_back()
    try:
        _prove()
    except BaseException:
        release(interceptor)
        raise


def release(interceptor: Interceptor) -> None:
    """Undo one `hold`; once no `hold` is left, torch's entry is its own."""
    with _lock:
        _holders.remove(interceptor)
        _replace_or_put_back()


def _replace_or_put_back() -> None:
    global _step_hook
    if _holders:
        set_engine_run_backward(_intercepted)
    if _holders and _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_before_any_step)
    elif not _holders and _step_hook is not None:
        set_engine_run_backward(run_backward)
        _step_hook.remove()
        _step_hook = None


def begin(interceptor: Interceptor) -> None:
    """Route the calls of this thread to `interceptor`, which holds torch's entry."""
    if engine_entry() is not _intercepted:  # put back between two steps
        set_engine_run_backward(_intercepted)
    _active[threading.get_ident()] = interceptor


def end() -> RuntimeError | None:
    """Leave the calls of this thread alone again.

    Returns:
        The error to raise if something else took the place of the entry within the step, whose backward calls may have
        bypassed genlight.
    """
    _active.pop(threading.get_ident(), None)
    found: Any = engine_entry()
    if found is _intercepted or not _holders:
        return None
    set_engine_run_backward(_intercepted)
    return RuntimeError(
        f"torch.autograd._engine_run_backward was replaced by {found.__module__}.{found.__qualname__} in the middle of "
        "a step, so that backward calls may have been neither averaged nor unscaled. End what replaces it within the "
        "step that begins it, or remove it."
    )


def is_active(interceptor: Interceptor) -> bool:
    """Whether the calls of this thread go to `interceptor`."""
    return _active.get(threading.get_ident()) is interceptor


def wrap(optimizer: Optimizer, name: str, through: Callable[..., Any]) -> None:
    """Route ``optimizer.<name>`` through ``through(optimizer, inner, …)``.

    As a bound method that keeps its attributes: LR schedulers take it apart to count calls.
    """
    inner = getattr(optimizer, name)

    @functools.wraps(inner)
    def routed(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        return through(self, inner, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(routed, optimizer))


@functools.cache
def _prove() -> None:
    """Call backward and ``torch.autograd.grad`` once in this process, and look whether both come through the entry."""
    seen: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            seen.append(name)
            return (None,)

        return call

    canary: Any = types.SimpleNamespace(in_backward=False, backward=noted("backward"), grad=noted("grad"))
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


def _intercepted(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
    interceptor = _active.get(threading.get_ident())
    if interceptor is None and current_graph_task_id() != -1:  # on a device, backward has a thread of its own
        interceptor = next((each for each in _active.values() if each.in_backward), None)
    if interceptor is None:
        return run_backward(outputs, grads, *args, **kwargs)
    if interceptor.in_backward:
        return interceptor.within_backward(outputs, grads, *args, **kwargs)
    # What torch.autograd.grad computes is not accumulated anywhere.
    if not kwargs.get("accumulate_grad"):
        return interceptor.grad(outputs, grads, *args, **kwargs)
    return interceptor.backward(outputs, grads, *args, **kwargs)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001  # torch's signature
    interceptor = _active.get(threading.get_ident())
    if interceptor is not None:
        interceptor.check_managed(optimizer)


class GradientGuard:
    """Calls a function before a gradient of a parameter is read, and when one is written.

    For that a parameter is of a subclass of its own class while it is guarded; it stays the object that everybody
    holds. One of a class of the trainer's own cannot be guarded.

    Args:
        on_read: Called with a parameter whose gradient is wanted, before it is given out.
        on_write: Called with a parameter and what its gradient is about to become.
    """

    def __init__(self, on_read: Callable[[Tensor], None], on_write: Callable[[Tensor, Tensor | None], None]) -> None:
        self._on_read, self._on_write = on_read, on_write
        self._classes: dict[type, type[Any]] = {kind: self._subclass(kind) for kind in (nn.Parameter, Tensor)}
        self._known: Sequence[Tensor] | None = None
        self._guarded: dict[type, list[Tensor]] = {}
        self._is_on = False

    def guard(self, parameters: Sequence[Tensor]) -> bool:
        """Guard `parameters`, the same list while they are the same; False where one of them cannot be guarded."""
        if parameters is not self._known:
            self.unguard()
            self._known = parameters
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
        """Parameters are plain again."""
        for kind, guarded in self._guarded.items():
            for parameter in guarded:
                parameter.__class__ = kind
        self._is_on = False

    def _subclass(self, kind: type[Any]) -> type[Any]:
        def read(tensor: Any) -> Any:
            self._on_read(tensor)
            return read_gradient(tensor)

        def write(tensor: Any, value: Any) -> None:
            self._on_write(tensor, value)
            write_gradient(tensor, value)

        def as_plain(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def called(tensor: Any, argument: Any) -> Any:
                self._on_read(tensor)
                tensor.__class__, self._is_on = kind, False  # until it is guarded again
                return call(tensor, argument)

            return called

        members = {
            "grad": property(read, write),
            "__deepcopy__": as_plain(copy.deepcopy),
            "__reduce_ex__": as_plain(lambda tensor, protocol: tensor.__reduce_ex__(protocol)),
            # Of torch.Tensor, too, what is computed from it is of no class of ours.
            "__torch_function__": disabled_torch_function,
        }
        return type(kind.__name__, (kind,), members)
