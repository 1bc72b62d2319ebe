"""Where torch is touched: its engine's entry for backward calls, and the ``step`` of managed optimizers.

The entry is replaced while it is held, for a whole training, and put back when it is not. Calls between steps
and of other threads, and those of ``torch.autograd.grad``'s kind inside of a backward, go straight through. Where
gradients are averaged, so are collectives.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...callbacks.lightning_internals import SUPPORTED
from . import collective_patch
from .torch_internals import (
    current_graph_task_id,
    engine_run_backward,
    keep_out_of_graphs,
    set_engine_run_backward,
)

__all__ = ["Interceptor", "begin", "end", "hold", "is_active", "release", "run_backward", "wrap"]

_WITHOUT_GRAPHS = tuple(
    f"{__package__}.{name}"
    for name in (
        *(
            "autograd_patch",
            "step",
            "step_part",
            "fp16",
            "averaging",
            "lazy_sync",
            "gradient_sync",
            "averaged_parameters",
        ),
        *("bucket_plans", "buckets", "buffer_sync", "early_buckets", "equal_replicas", "exchange", "rank_notes"),
        *("rank_points", "sent_points", "update_guard"),
    )
)
"""What runs in a trainer's backward calls and updates; not what is called in its forward, which has to be traced."""

run_backward = engine_run_backward
"""Torch's own entry: outputs, their gradients, then what the engine takes."""


class Interceptor(Protocol):
    """What is called instead, in the thread that began it."""

    in_backward: bool
    """Whether one of its backward calls is running; a call inside of it is activation checkpointing."""

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over several ranks."""

    def before_collective(self, name: str) -> None:
        """The trainer is about to wait for other ranks by the function `name` of ``torch.distributed``."""

    def backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        """A backward call of the trainer."""

    def grad(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of ``torch.autograd.grad``."""

    def check_managed(self, optimizer: Optimizer) -> None:
        """Any optimizer is about to step."""


_active: dict[int, Interceptor] = {}
"""By thread, of those in which a step runs."""
_lock = threading.Lock()
_holders: list[Interceptor] = []
_step_hook: RemovableHandle | None = None
_collectives_are_patched = False


def hold(interceptor: Interceptor) -> None:
    """Replace torch's entries until `release`, which may come many steps later: replacing them costs some 10 µs.

    Raises:
        RuntimeError: A backward call of this torch does not come through the entry that was replaced.
    """
    keep_out_of_graphs(*_WITHOUT_GRAPHS)
    with _lock:
        _holders.append(interceptor)
        _replace_or_put_back()
    if not _Canary.is_proven:
        try:
            _Canary().prove()
        except BaseException:
            release(interceptor)
            raise


def release(interceptor: Interceptor) -> None:
    """Undo one `hold`; once no `hold` is left, torch's entries are its own."""
    with _lock:
        _holders.remove(interceptor)
        _replace_or_put_back()


def _replace_or_put_back() -> None:
    global _step_hook, _collectives_are_patched
    if _holders:
        set_engine_run_backward(_intercepted)
    if _holders and _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_before_any_step)
    elif not _holders and _step_hook is not None:
        set_engine_run_backward(run_backward)
        _step_hook.remove()
        _step_hook = None
    averages = any(holder.averages for holder in _holders)
    if averages and not _collectives_are_patched:
        collective_patch.patch(_before_any_collective)
    elif not averages and _collectives_are_patched:
        collective_patch.restore()
    _collectives_are_patched = averages


def begin(interceptor: Interceptor) -> None:
    """Route the calls of this thread to `interceptor`, which holds torch's entries."""
    _active[threading.get_ident()] = interceptor


def end() -> None:
    """Leave the calls of this thread alone again."""
    _active.pop(threading.get_ident(), None)


def is_active(interceptor: Interceptor) -> bool:
    """Whether the calls of this thread, that of a step or one of torch's engine, go to `interceptor`."""
    return (_active.get(threading.get_ident()) or _of_engine()) is interceptor


def wrap(optimizer: Optimizer, name: str, through: Callable[..., Any]) -> None:
    """Route ``optimizer.<name>`` through ``through(optimizer, inner, …)``.

    As a bound method that keeps its attributes: LR schedulers take it apart to count calls.
    """
    inner = getattr(optimizer, name)

    @functools.wraps(inner)
    def routed(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return through(self, inner, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(routed, optimizer))


class _Canary:
    """Takes one backward call, to prove that what is assigned to torch is what torch calls."""

    is_proven = False
    averages = False

    def __init__(self) -> None:
        self.in_backward = False
        self._seen: list[str] = []

    def prove(self) -> None:
        """Call backward and ``torch.autograd.grad`` in this thread, and look whether both come here."""
        thread = threading.get_ident()
        before = _active.get(thread)
        _active[thread] = self
        try:
            with torch.inference_mode(False), torch.enable_grad():
                leaf = torch.ones((), device="cpu", requires_grad=True)
                (leaf * 1).backward()  # type: ignore[no-untyped-call]
                torch.autograd.grad(leaf * 1, leaf)
        finally:
            if before is None:
                del _active[thread]
            else:
                _active[thread] = before
        if self._seen != ["backward", "grad"]:
            raise RuntimeError(
                f"torch {version('torch')} runs backward calls past the entry through which genlight routes them, so "
                f"that gradients would be neither averaged nor unscaled; install a release that genlight supports: "
                f"{SUPPORTED['torch']}"
            )
        type(self).is_proven = True

    def backward(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        self._seen.append("backward")

    def grad(self, outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        self._seen.append("grad")
        return (None,)

    def before_collective(self, name: str) -> None:
        """Nothing: none is called."""

    def check_managed(self, optimizer: Optimizer) -> None:
        """Nothing: none steps."""


def _intercepted(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
    interceptor = _active.get(threading.get_ident()) or _of_engine()
    if interceptor is None or interceptor.in_backward:
        return run_backward(outputs, grads, *args, **kwargs)
    # What torch.autograd.grad computes is not accumulated anywhere.
    if not kwargs.get("accumulate_grad"):
        return interceptor.grad(outputs, grads, *args, **kwargs)
    return interceptor.backward(outputs, grads, *args, **kwargs)


def _of_engine() -> Interceptor | None:
    """In a thread of torch's engine: the one whose backward call it works for."""
    if current_graph_task_id() == -1:
        return None
    python_threads = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
    if threading.get_ident() in {thread.ident for thread in python_threads}:
        return None  # a backward call of another caller
    return next((each for each in tuple(_active.values()) if each.in_backward), None)


def _before_any_collective(name: str) -> None:
    interceptor = _active.get(threading.get_ident())
    if interceptor is not None and not interceptor.in_backward:
        interceptor.before_collective(name)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001  # torch's signature
    interceptor = _active.get(threading.get_ident()) or _of_engine()
    if interceptor is not None:
        interceptor.check_managed(optimizer)
