"""Random states of data workers: sent to this process with each batch, and restored in the workers of a resumed run.

A worker prepares batches ahead of training, so this process cannot ask it for the state that belongs to the batch it
has just trained. Instead, each worker attaches its random states to the batch: Python's, NumPy's, torch's, and those of
the generators that the dataset or the collate function holds. Only states that have changed travel, about 10 kB each.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ...adapter.plumbing.generators import GENERATORS, set_state, state_of

log = logging.getLogger(__name__)

_SEARCHED_ITEMS = 1_000
"""Maximum size of a list or dictionary that is searched for generators; longer ones hold data."""
_SEARCHED_OBJECTS = 10_000
_ATOMS = (str, bytes, int, float, complex, type, types.ModuleType, torch.Tensor, np.ndarray, type(None))


class _Delivery(NamedTuple):
    """A batch on its way from a worker; torch pins the members of a named tuple one by one."""

    batch: Any
    worker: int
    states: dict[str, Any] | None
    """The worker's random states after this batch; None if they have not changed."""


class WorkerStates:
    """The random states of a loader's workers after the last batch that the loader delivered.

    Attributes:
        states: One for each worker; None for one that has drawn no random number yet.
        draws: Whether workers have drawn random numbers at any time.
    """

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.draws = False

    @contextlib.contextmanager
    def attached(self, loader: DataLoader[Any], restored: Sequence[Any] = ()) -> Iterator[None]:
        """Have the workers that `loader` starts in this block send their states; the loader itself stays as it is.

        Args:
            loader: The loader, which reads its collate function and `worker_init_fn` when it starts workers.
            restored: States with which the workers continue, one for each; if empty, they begin as torch seeds them.
        """
        if loader.num_workers == 0:
            yield
            return
        self.states = list(restored) or [None] * loader.num_workers
        collate, init = loader.collate_fn, loader.worker_init_fn
        sender = _Sender(collate)
        loader.collate_fn = sender
        loader.worker_init_fn = functools.partial(_begin, sender, init, self.states.copy())
        try:
            yield
        finally:
            loader.collate_fn, loader.worker_init_fn = collate, init

    def take(self, delivery: Any) -> Any:
        """Return the batch of a delivery and keep the worker's states; return a batch of this process unchanged."""
        if not isinstance(delivery, _Delivery):
            return delivery
        if delivery.states is not None:
            self.states[delivery.worker], self.draws = delivery.states, True
        return delivery.batch


class _Sender:
    """The collate function of a worker, which attaches the worker's random states to each batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._sent: bytes | None = None
        self._generators: list[Any] = []

    def begin(self, state: Any) -> None:
        """Continue from `state`; None leaves the random numbers as they are."""
        self._find_generators()
        if state is not None:
            own = state["own"]
            if len(own) != len(self._generators):
                log.warning(
                    "The dataset held %d generators of random numbers in this worker and holds %d: they begin again. "
                    "Make generators in `__init__` or in `worker_init_fn`, so that their states can be restored.",
                    len(own),
                    len(self._generators),
                )
            _restore_random_states(state, self._generators if len(own) == len(self._generators) else ())
        self._sent = pickle.dumps(_random_states(self._generators))

    def __call__(self, rows: Any) -> _Delivery:
        batch, info = self._collate(rows), get_worker_info()
        assert info is not None
        if not self._generators:
            self._find_generators()  # the first rows may have made one
        states = _random_states(self._generators)
        before, self._sent = self._sent, pickle.dumps(states)
        return _Delivery(batch, info.id, None if self._sent == before else states)

    def _find_generators(self) -> None:
        info = get_worker_info()
        self._generators = own_generators(info.dataset if info is not None else None, self._collate)


def _begin(sender: _Sender, init: Callable[[int], None] | None, states: Sequence[Any], worker: int) -> None:
    """Prepare a new worker that torch has already seeded."""
    if init is not None:
        init(worker)
    sender.begin(states[worker])


def _random_states(generators: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the random states of the host and of `generators` as plain values and arrays."""
    return {
        "python": state_as_arrays(random),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy(),
        "own": [state_as_arrays(generator) for generator in generators],
    }


def _restore_random_states(states: dict[str, Any], generators: Sequence[Any] = ()) -> None:
    """Restore a result of `_random_states`."""
    set_state(random, states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    for generator, state in zip(generators, states["own"], strict=False):
        set_state(generator, state)


def state_as_arrays(generator: Any) -> Any:
    """Return the state of a generator without tensors, which workers would send in shared memory, one file each."""
    state = state_of(generator)
    if isinstance(state, torch.Tensor):
        return state.numpy()
    if isinstance(generator, random.Random) or generator is random:
        return {**state, "words": state["words"].numpy().astype(np.uint32)}
    return state


def own_generators(*roots: Any) -> list[Any]:
    """Return the generators of random numbers that `roots` hold, each once, in a stable order.

    Attributes, closures and small containers are searched, not the data in them.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = list(reversed(roots))
    while waiting and len(seen) < _SEARCHED_OBJECTS:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom):  # it has no state
                found[id(value)] = value
            continue
        waiting += reversed(_held_by(value))
    return list(found.values())


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, dict | list | tuple) and len(value) > _SEARCHED_ITEMS:
        return []
    if isinstance(value, dict):
        return list(dict.values(value))  # not a method of a subclass: some count what is read
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        with contextlib.suppress(ValueError):  # an empty cell
            return [cell.cell_contents for cell in cells]
        return []
    return list(getattr(value, "__dict__", {}).values())
