"""Data workers outlive a stop signal that was sent to the whole process group, as schedulers and terminals send it.

The training process finishes its step and saves a checkpoint then, for which it may need further batches. A worker
ends when its loader ends it, when the loader's iterator is gone, or when the training process is.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from typing import Any

from torch.utils.data import DataLoader

from ..lightning_internals import require_names
from .signals import REASON_OF_SIGNAL

__all__ = ["protected_workers", "start_workers"]

_ENTRY = "_get_iterator"
"""The factory by which a loader makes its workers, however it is called; a kind of loader may have one of its own."""

require_names("torch", DataLoader, _ENTRY)

PATIENCE_S = 10.0
"""How long a worker may take to end by its loader, once the iterator is gone."""

_Start = Callable[[DataLoader[Any]], Iterator[Any]]
_start: _Start = getattr(DataLoader, _ENTRY)


@contextlib.contextmanager
def protected_workers() -> Iterator[None]:
    """Have `start_workers` make the workers of every torch data loader of this process, for the length of a block.

    Also those of kinds that make their iterators themselves, as torchdata's ``StatefulDataLoader``. Workers that run
    when the block ends stay as they are. A block within a block does nothing.
    """
    kinds = {kind: vars(kind)[_ENTRY] for kind in _kinds(DataLoader) if _ENTRY in vars(kind)}
    if isinstance(kinds[DataLoader], functools.partialmethod):
        kinds = {}
    for kind, start in kinds.items():
        setattr(kind, _ENTRY, functools.partialmethod(start_workers, start))
    try:
        yield
    finally:
        for kind, start in kinds.items():
            setattr(kind, _ENTRY, start)


def _kinds(base: type[DataLoader[Any]]) -> Iterator[type[DataLoader[Any]]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def start_workers(loader: DataLoader[Any], start: _Start = _start) -> Iterator[Any]:
    """An iterator of `loader`, which `start` makes, whose workers heed no stop signal; the loader stays as it is.

    Where a fork server makes the workers, signals that come before they run end them, and the server's own end by a
    signal has them end after their next batch.
    """
    init = loader.worker_init_fn
    if loader.num_workers == 0 or getattr(init, "func", None) is _begin:  # the latter by a subclass that calls its base
        return start(loader)
    ours, theirs = multiprocessing.Pipe(duplex=False)[::-1]
    util.register_after_fork(ours, Connection.close)
    loader.worker_init_fn = functools.partial(_begin, theirs, init)
    try:
        with _signals_held_back(loader):
            iterator = start(loader)
    finally:
        loader.worker_init_fn = init
        theirs.close()
    # Also at exit, and before multiprocessing waits for workers that heed no SIGTERM.
    util.Finalize(iterator, ours.close, exitpriority=0)
    return iterator


@contextlib.contextmanager
def _signals_held_back(loader: DataLoader[Any]) -> Iterator[None]:
    """Processes that are started in this block are sent no stop signal before they call `_begin`."""
    context = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method()
    if method == "forkserver":  # it would hand the mask on to every process that it ever makes
        yield
        return
    if method == "spawn":  # starts a helper first, after which Python 3.11 lets signals through
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REASON_OF_SIGNAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(leash: Connection, init: Callable[[int], None] | None, worker: int) -> None:
    """In the main thread of a new worker, before anything of the user's."""
    for number in REASON_OF_SIGNAL:
        # Neither ignored nor blocked: programs that a worker starts would inherit that, and never end on SIGTERM.
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_with, args=(leash, os.getppid()), name="genlight-leash", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REASON_OF_SIGNAL)
    if init is not None:
        init(worker)


def _end_with(leash: Connection, parent: int) -> None:
    """End this worker once the other end of the leash is closed, which the kernel does if nothing else could."""
    with contextlib.suppress(EOFError, OSError):
        leash.recv_bytes()
    end = time.monotonic() + PATIENCE_S
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.1)
    os._exit(0)
