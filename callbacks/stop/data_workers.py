"""Keep data workers alive when a stop signal is sent to the whole process group, and let a stop end a wait for them.

Schedulers and terminals signal the whole group. The training process may still need batches to finish its step and to
save. A worker ends when its loader ends it, or when the loader's iterator or the training process is gone.

A dataset may block, for example on a file system that does not answer. While the training process waits for a batch, it
therefore asks about every 0.1 s whether to stop.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typing_extensions import override

from ...adapter.contract.exceptions import InputError
from ..lightning_internals import require_names
from .signals import REASON_OF_SIGNAL

_ENTRY = "_get_iterator"
"""Method of a loader that makes its iterator and workers; subclasses may override it."""

require_names("torch", DataLoader, _ENTRY)
require_names("torch", _MultiProcessingDataLoaderIter, "_try_get_data")

NO_SPACE = os.strerror(errno.ENOSPC)
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - nothing is written there by name

PATIENCE_S = 10.0
"""Seconds that a loader has to end a worker once the iterator is gone; after that, the worker ends itself."""

LOOK_EVERY_S = 0.1
"""Interval at which a wait for a batch asks whether to stop."""

_Start = Callable[[DataLoader[Any]], Iterator[Any]]
_start: _Start = getattr(DataLoader, _ENTRY)
_on_wait: list[Callable[[float], None] | None] = []
"""The `on_wait` of each active `protected_workers`, innermost last; only that one is called."""


@contextlib.contextmanager
def protected_workers(on_wait: Callable[[float], None] | None = None) -> Iterator[None]:
    """Have `start_workers` make the workers of every torch data loader of this process during the block.

    This includes loader classes that make their iterators themselves, such as torchdata's ``StatefulDataLoader``.
    Workers that run when the block ends stay as they are. Blocks may be nested.

    Args:
        on_wait: Called about every 0.1 s while a thread waits for a batch of workers, with the duration of the wait so
            far in seconds. It ends the wait by raising an exception.
    """
    kinds = {kind: vars(kind)[_ENTRY] for kind in _kinds(DataLoader) if _ENTRY in vars(kind)}
    if isinstance(kinds[DataLoader], functools.partialmethod):  # an outer block has replaced the methods
        kinds = {}
    for kind, start in kinds.items():
        setattr(kind, _ENTRY, functools.partialmethod(start_workers, start))
    _on_wait.append(on_wait)
    try:
        yield
    finally:
        _on_wait.pop()
        for kind, start in kinds.items():
            setattr(kind, _ENTRY, start)


def _kinds(base: type[DataLoader[Any]]) -> Iterator[type[DataLoader[Any]]]:
    """Yield `base` and all classes derived from it."""
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def start_workers(loader: DataLoader[Any], start: _Start = _start) -> Iterator[Any]:
    """Return the iterator of `loader` that `start` makes, with workers that ignore stop signals.

    The loader itself is not changed. Workers of a fork server are less protected: a signal that comes before they run
    `_begin` ends them, and if a signal ends the server, they end after their next batch.
    """
    init = loader.worker_init_fn
    # If a subclass's method calls its base's, this runs twice; the outer call has already set `_begin`.
    if loader.num_workers == 0 or getattr(init, "func", None) is _begin:
        return start(loader)
    ours, theirs = multiprocessing.Pipe(duplex=False)[::-1]
    util.register_after_fork(ours, Connection.close)
    loader.worker_init_fn = functools.partial(_begin, theirs, init)
    try:
        with _block_stop_signals(loader):
            iterator = start(loader)
    finally:
        loader.worker_init_fn = init
        theirs.close()
    # Closing the pipe ends the workers. Close it when the iterator is gone, or at exit before multiprocessing waits for
    # the workers: its SIGTERM does not end them.
    util.Finalize(iterator, ours.close, exitpriority=0)
    if hasattr(iterator, "_try_get_data"):
        iterator.__class__ = _stoppable_class(type(iterator))
        vars(iterator)["_leash"] = ours
    return iterator


class _StoppableIterator:
    """An iterator of torch that calls `_on_wait` while it waits for a batch."""

    _leash: Connection
    """Pipe to the workers; they end at a message, or when it is closed."""
    _workers: list[Any]
    _waits_since: float | None = None

    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        now = time.monotonic()
        end = now + timeout
        while True:
            answer: tuple[bool, Any] = super()._try_get_data(max(min(LOOK_EVERY_S, end - now), 0.0))  # type: ignore[misc]
            if answer[0]:
                self._waits_since = None
                return answer
            now = time.monotonic()
            if self._waits_since is None:
                self._waits_since = now
            if (on_wait := _on_wait[-1] if _on_wait else None) is not None:
                try:
                    on_wait(now - self._waits_since)
                except BaseException:
                    for _ in self._workers:  # torch would wait for blocked workers
                        self._leash.send_bytes(b"end")
                    raise
            if now >= end:
                return answer


@functools.cache
def _stoppable_class(kind: type) -> type:
    return type(kind.__name__, (_StoppableIterator, kind), {"__module__": kind.__module__})


@contextlib.contextmanager
def _block_stop_signals(loader: DataLoader[Any]) -> Iterator[None]:
    """Block stop signals for processes started in this block, until they call `_begin`."""
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method()
    if method == "forkserver":  # the server may start here, and every later process of it would inherit the mask
        yield
        return
    if method == "spawn":  # otherwise Python 3.11 starts this helper within the block, and thereby unblocks signals
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REASON_OF_SIGNAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(leash: Connection, init: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a new worker, in its main thread, before any code of the user runs there."""
    for number in REASON_OF_SIGNAL:
        # Programs that a worker starts inherit an ignored or blocked signal, but not a handler, so they end on SIGTERM.
        signal.signal(number, lambda *_: None)
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]
    threading.Thread(target=_end_with, args=(leash, os.getppid()), name="genlight-leash", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
    if init is not None:
        init(worker)


def _send_failure(queue: Queue[Any], error: Exception, unsent: Any) -> None:
    """Send `error` in place of a batch. Python would only print it, and torch would wait forever."""
    task, content = unsent
    failure = _NotHandedOver(error)
    # torchdata's loaders send a batch with the number of the worker and its state.
    queue.put((task, (failure, content[1], None) if isinstance(content, tuple) and len(content) == 3 else failure))


class _NotHandedOver(ExceptionWrapper):
    """Sent in place of a batch; torch calls `reraise` when it receives it."""

    def __init__(self, error: Exception) -> None:
        super().__init__((type(error), error, error.__traceback__))  # type: ignore[no-untyped-call]
        self.problem = f"{type(error).__name__}: {error}"

    @override
    def reraise(self) -> None:
        raise hand_over_error(self.problem)


def hand_over_error(problem: str) -> InputError:
    """Return the error for a batch that a data worker could not hand over, with the way out."""
    if NO_SPACE not in problem:
        return InputError(
            f"A data worker could not send a batch to the training process: {problem}. Make batches of tensors, arrays "
            "and plain values, or train without workers."
        )
    with contextlib.suppress(OSError):
        problem += f" (/dev/shm has {shutil.disk_usage(SHARED_MEMORY).total >> 20} MiB)"
    return InputError(
        f"A data worker could not hand over a batch: {problem}. Workers hand tensors over in /dev/shm, which has "
        "64 MiB in a container by default. Make it larger (Docker: `--shm-size=8g`; Kubernetes: an `emptyDir` with "
        "`medium: Memory` mounted there), use smaller batches, or train without workers (`workers: 0` in a job, "
        "`num_workers=0` of a DataLoader)."
    )


def _end_with(leash: Connection, parent: int) -> None:
    """End this worker at a message, or some time after the training process has closed the pipe or ended."""
    patience_s = PATIENCE_S
    with contextlib.suppress(EOFError, OSError):
        leash.recv_bytes()
        patience_s = 0.0
    end = time.monotonic() + patience_s
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.1)
    os._exit(0)
