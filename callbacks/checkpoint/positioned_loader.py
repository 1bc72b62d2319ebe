"""Data loaders that continue in the middle of an epoch.

`with_position` adds a position to a plain ``DataLoader``, which yields the same batches as before. The position is the
random state from which the sampler drew the order of the epoch, and the number of batches taken. A resume draws that
order again and skips the rows of those batches without reading them. `sampler_order` proves that it is the same order.

The random states of data workers belong to the position. A worker prepares batches ahead of training, so this process
cannot ask it for the state that belongs to the batch it has just trained. Instead, each worker attaches its random
states to the batch: Python's, NumPy's, torch's, and those of the generators that the dataset or the collate function
holds. Only states that have changed travel, about 10 kB each. In a resumed run they are restored in the workers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from ...adapter.contract.exceptions import InputError
from ...adapter.plumbing.devices import isolated_random_numbers
from ...adapter.plumbing.generators import held_generators, set_state, state_as_arrays
from ..lightning_internals import require_names
from .sampler_order import SamplerOrder

log = logging.getLogger(__name__)

_BEGUN = "epoch_begun_with"
"""Key that marks a position as made by this module."""
WORKERS = "genlight_workers"
"""Key in a loader's state for the states of its workers and its dataset, which differ between ranks."""

require_names("torch", _MultiProcessingDataLoaderIter, "_try_put_index", "_prefetch_factor")
require_names("torch", DataLoader, "_get_iterator", "_index_sampler")

_ITERATION = ("__iter__", "_get_iterator", "_index_sampler")
"""Methods of a ``DataLoader`` that decide what it delivers."""
_ORDER = ("begun", "source", "progress")
"""Keys in the state for `WORKERS` that describe the order of rows."""
_NEEDS_NO_PROOF = (SequentialSampler, DistributedSampler)
"""Samplers that continue even without this rank's `progress`: the position that all ranks share gives their order."""


def with_position(loader: Any) -> Any:
    """Return `loader` with a position if it is a ``DataLoader`` over rows that iterates as torch does.

    A loader of torchdata has a position already, and gets one that includes the random states of its workers. Any
    other loader is returned unchanged.
    """
    kind = type(loader)
    if any(base.__module__.startswith("torchdata.stateful_dataloader") for base in kind.__mro__):
        return loader if isinstance(loader, KeepsWorkers) else extend_loader(loader, KeepsWorkers)
    if not isinstance(loader, DataLoader) or isinstance(loader, PositionedLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset) or (loader.num_workers > 1 and not loader.in_order):
        return loader
    own = kind.__mro__[: kind.__mro__.index(DataLoader)]
    if is_stateful(loader) or any(name in vars(base) for base in own for name in _ITERATION):
        return loader
    if kind is DataLoader:
        return PositionedLoader(loader)
    extended: Any = object.__new__(type(kind.__name__, (PositionedLoader, kind), {"__module__": kind.__module__}))
    PositionedLoader.__init__(extended, loader)
    return extended


def is_stateful(loader: Any) -> bool:
    """Whether `loader` keeps a position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def is_own_position(state: Any) -> bool:
    """Whether `state` is the position of a `PositionedLoader`."""
    return isinstance(state, dict) and _BEGUN in state


def without_order(workers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state for `WORKERS` without the order of rows, which depends on the number of ranks."""
    return {name: value for name, value in workers.items() if name not in _ORDER}


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators of `loaders` and their samplers, each once, in the order of the loaders.

    A loader of torchdata stores its position, but not the state in which its iterator has left such a generator.
    """
    holders = (holder for loader in loaders for holder in (loader, getattr(loader, "sampler", None)))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


class PositionedLoader(DataLoader[Any]):
    """A ``DataLoader`` with the position that a checkpoint holds.

    The rows of the batches that were taken are not read again. Random numbers that the dataset and the collate function
    draw continue as well, in this process and in as many workers as the checkpoint was saved with.

    Args:
        loader: The loader to extend. Workers that it has already started are not used.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._iterator: Any = None
        self._begun: dict[str, Any] | None = None
        """Random states with which the epoch was begun; None between epochs."""
        self._batches = 0
        self._order = SamplerOrder(self.sampler if self.batch_sampler is None else self.batch_sampler)
        self._source: dict[str, Any] | None = None
        """State of the samplers when this epoch began, a result of `SamplerOrder.begin`."""
        self._progress: dict[str, Any] | None = None
        """Rows handed out before the checkpoint, a result of `SamplerOrder.progress`; None if that is unknown."""
        self._resumes = False
        self._workers = WorkerStates()
        self._started: dict[str, Any] | None = None
        """Random states with which the workers were started. Persistent ones were started in an earlier epoch."""
        self._is_seeded = True
        """Whether the epoch drew the seed of new workers before it drew its order."""
        self._to_restore: dict[str, Any] | None = None
        """State of the workers and the dataset for the first pass after a resume."""
        self.lost_on_resume: str | None = None
        """The reason why random numbers of workers cannot be restored, for a warning."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # All of this happens at the first batch, as in a plain loop: Lightning makes iterators that it does not use.
        restored, self._to_restore = self._to_restore or {}, None
        batches = self._rest(self._begun, restored) if self._resumes and self._begun is not None else None
        for generator, state in zip(self._own_generators(), restored.get("own", ()), strict=False):
            set_state(generator, state)
        if batches is None:
            if self.persistent_workers and self._iterator is None and restored.get("started") is not None:
                self._iterator = self._start(restored)
            batches = self._whole_pass()
        self._resumes = False
        for delivery in batches:
            batch = self._workers.take(delivery)
            self._order.note_delivery()
            self._batches += 1
            yield batch
        self._begun, self._batches = None, 0

    def _whole_pass(self) -> Iterator[Any]:
        """Begin a new pass, and return its batches."""
        self._begun, self._source, self._batches = self._random_states(), self._order.begin(), 0
        self._is_seeded = self._iterator is None
        if self._iterator is not None:
            # If the last epoch ended early, the workers have prepared more batches of it, and drawn random numbers for
            # them. torch would drop these batches with the workers' random states, so take the states here. An error
            # in such a batch does not concern this epoch.
            self._iterator._sampler_iter = iter(())
            for _ in range(self.num_workers * (self.prefetch_factor or 0)):
                with contextlib.suppress(Exception):
                    self._workers.take(next(self._iterator, None))
            return super().__iter__()
        self._started = self._begun
        with self._workers.attached(self):
            return super().__iter__()

    def _rest(self, begun: Mapping[str, Any], restored: Mapping[str, Any]) -> Iterator[Any] | None:
        """Return the remaining batches of an epoch; None if its order cannot be repeated."""
        order = self._repeated_order(begun)
        if order is None:
            log.warning(
                "The run continues within an epoch, but the %s does not repeat the order of that epoch, because the "
                "order depends on more than random numbers and plain attributes. The loader starts again with its "
                "first batch. Give the loader `state_dict` and `load_state_dict`, or save between epochs.",
                type(self._order.sampler).__name__,
            )
            return None
        batches = self._start({"started": begun, **restored})
        # Each worker gets the same batches as in an uninterrupted run, also in later epochs.
        hand_out(batches, order, first_worker=self._batches)
        if self.persistent_workers:
            self._iterator = batches
        return cast("Iterator[Any]", batches)

    def _repeated_order(self, begun: Mapping[str, Any]) -> Iterator[Any] | None:
        """Return the order of an epoch without the batches already taken, and advance the generators past those."""
        if self._progress is None and type(self.sampler) not in _NEEDS_NO_PROOF:
            return None
        with isolated_random_numbers():
            self._set_random_states(begun)
            if self._source is not None:
                self._order.set_source_state(self._source)
            return self._order.rest(self._batches, self._progress, after_begin=self._draw_seed)

    def _draw_seed(self) -> None:
        if self._is_seeded:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def _start(self, restored: Mapping[str, Any]) -> Any:
        """Return an iterator whose workers continue from `restored`. Its first pass is empty, later ones complete."""
        before = None if self.generator is None else self.generator.get_state()
        self._started = restored["started"]
        loader: DataLoader[Any] = object.__new__(DataLoader)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        vars(loader).update(vars(self) | {name: (), "_iterator": None})
        with isolated_random_numbers(), self._workers.attached(loader, restored.get("states", ())):
            self._set_random_states(restored["started"])
            iterator: Any = iter(loader)
        iterator._index_sampler = self._order
        if before is not None:
            self.generator.set_state(before)
        return iterator

    def leave_epoch(self) -> None:
        """Skip the rest of an epoch that ended early, so that the next pass is a new one."""
        if self._resumes and self._begun is not None:
            if self.persistent_workers:
                restored, self._to_restore = self._to_restore or {}, None
                # Workers that were not interrupted would have drawn numbers for the batches that they had prefetched.
                self._rest(self._begun, restored)
            else:
                prefetched = self.num_workers * (self.prefetch_factor or 0)
                deque(islice(self._repeated_order(self._begun) or (), prefetched), maxlen=0)
        self._resumes = False

    @property
    @override
    def _index_sampler(self) -> Any:
        return self._order

    def _random_states(self) -> dict[str, Any]:
        host = _random_states()
        if self._order.is_of_torch:
            del host["python"], host["numpy"]
        return {"host": host, "generator": None if self.generator is None else self.generator.get_state()}

    def _set_random_states(self, states: Mapping[str, Any]) -> None:
        _restore_random_states(states["host"])
        if self.generator is not None and states["generator"] is not None:
            self.generator.set_state(states["generator"].cpu())

    def _own_generators(self) -> list[Any]:
        """Return the generators of the dataset and the collate function, if these run in this process."""
        if self.num_workers:
            return []
        known = {id(generator) for generator in generators_of([self])}
        return [each for each in held_generators(self.dataset, self.collate_fn) if id(each) not in known]

    def state_dict(self) -> dict[str, Any]:
        """Return the position for a checkpoint; its entry `WORKERS` may differ between ranks."""
        return {
            _BEGUN: self._begun,
            "batches": self._batches,
            "rows": sized_len(self.sampler if type(self.sampler) in _NEEDS_NO_PROOF else self.dataset),
            "batch_size": self.batch_size,
            "sampler": type(self.sampler).__name__,
            "batch_sampler": type(self.batch_sampler).__name__,
            "is_seeded": self._is_seeded,
            WORKERS: self._to_restore if self._to_restore is not None else self._state_of_workers(),
        }

    def _state_of_workers(self) -> dict[str, Any]:
        """Return the state for `WORKERS`."""
        are_needed = self._begun is not None or self.persistent_workers
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.persistent_workers,
            "draws": self._workers.draws,
            "started": self._started if are_needed and self._started is not self._begun else None,
            "states": list(self._workers.states) if are_needed else [],
            "begun": self._begun,
            "source": self._order.source_state() if self._begun is None else self._source,
            "progress": None if self._begun is None else self._order.progress(),
            "own": [state_as_arrays(generator) for generator in self._own_generators()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that were taken.

        Raises:
            InputError: The loader has another number of rows on this rank, another sampler or another batch size.
        """
        now = self.state_dict()
        names = [name for name in ("rows", "batch_size", "sampler", "batch_sampler") if state[name] != now[name]]
        if state[_BEGUN] is not None and names:
            changed = ", ".join(f"{name} was {state[name]} and is {now[name]}" for name in names)
            raise InputError(
                f"The position of the DataLoader does not fit it: {changed}. Resume with the dataset, the batch size, "
                "the sampler and the number of ranks of the checkpoint, or from a checkpoint between epochs."
            )
        self._begun, self._batches = state[_BEGUN], state["batches"]
        self._is_seeded = state["is_seeded"]
        self._resumes = self._begun is not None
        self._load_state_of_workers(state.get(WORKERS))

    def _load_state_of_workers(self, saved: dict[str, Any] | None) -> None:
        """Keep the state for `WORKERS` until the next pass, without the parts that do not fit this loader."""
        self._to_restore, self.lost_on_resume, self._source, self._progress = saved, None, None, None
        if saved is None:  # the checkpoint was saved on fewer ranks, so it has no state for this one
            return
        self._source, self._progress = saved.get("source"), saved.get("progress")
        if self._begun is not None:
            self._begun = saved.get("begun", self._begun)  # a sampler may draw other numbers on each rank
            if saved["started"] is None:  # the workers were started at the beginning of this pass
                self._to_restore = saved = {**saved, "started": self._begun}
        elif self._source is not None:
            self._order.set_source_state(self._source)
        self._workers.draws = saved["draws"]
        now = {name: getattr(self, name) for name in ("num_workers", "persistent_workers")}
        changed = [name for name, value in now.items() if saved[name] != value]
        if not changed:
            return
        self._to_restore = {**saved, "states": [], "own": []}
        if "persistent_workers" in changed:
            self._to_restore["started"] = self._begun
        if saved["draws"] or not saved["num_workers"] or "persistent_workers" in changed:
            here, there = (", ".join(f"{name}={values[name]}" for name in changed) for values in (now, saved))
            self.lost_on_resume = (
                f"The DataLoader has {here}, but the checkpoint was saved with {there}. Rows continue in their order, "
                "but random numbers drawn in the dataset or the collate function are not those of an uninterrupted "
                "run. Resume with the former values for the same bits."
            )


class KeepsWorkers(DataLoader[Any]):
    """A loader of torchdata with the random states of its workers, or of its dataset, in its state."""

    _iterator: Any
    _states: WorkerStates
    _history: deque[list[Any]]
    """States of the workers after each of the last batches; torchdata reads some again after a resume."""
    _begun_with: list[Any]
    """States of the workers when the pass was begun."""
    _restored: dict[str, Any]
    _continues = False

    @override
    def _get_iterator(self) -> Any:
        restored, self._restored = getattr(self, "_restored", {}), {}
        if not hasattr(self, "_states"):
            self._states, self._begun_with = WorkerStates(), []
        # Workers draw numbers again for the batches that torchdata reads again.
        states = restored.get("begun" if restored.get("reads_again") else "states", ())
        isolated = isolated_random_numbers() if restored else contextlib.nullcontext()
        with isolated, self._states.attached(self, states):
            iterator = super()._get_iterator()
        self._begun_with = restored.get("begun", []) or list(self._states.states)
        every = getattr(self, "snapshot_every_n_steps", 1) or 1
        self._history = deque([restored.get("states") or list(self._states.states)], maxlen=every + 1)
        if not self.num_workers:
            own = held_generators(self.dataset, self.collate_fn)
            for generator, state in zip(own, restored.get("own", ()), strict=False):
                set_state(generator, state)
        return iterator

    @override
    def __iter__(self) -> Any:
        iterator = super().__iter__()
        if not self._continues:
            self._begun_with = list(self._states.states)
        self._continues = False
        return self._delivered(iterator)

    def _delivered(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for delivery in iterator:
            batch = self._states.take(delivery)
            self._history.append(list(self._states.states))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torchdata together with the random states."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        snapshot = state.get("_snapshot", {}).get("_worker_snapshots", {})
        since = state.get("_steps_since_snapshot", 0)
        own = [] if self.num_workers else held_generators(self.dataset, self.collate_fn)
        workers = {
            "states": self._history[max(-1 - since, -len(self._history))],
            "begun": self._begun_with,
            "reads_again": any(_is_read_again(each) for each in snapshot.values()),
            "own": [state_as_arrays(generator) for generator in own],
        }
        return {**state, WORKERS: workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`."""
        self._restored = state.get(WORKERS) or {}
        self._continues = True
        super().load_state_dict({name: value for name, value in state.items() if name != WORKERS})  # type: ignore[misc]


def _is_read_again(worker: Mapping[str, Any]) -> bool:
    """Whether torchdata has no state of a worker's iterable dataset, and reads all batches again."""
    fetcher = worker.get("fetcher_state")
    return fetcher is not None and fetcher["dataset_iter_state"] is None and worker["dataset_state"] is None


def hand_out(iterator: Any, indices: Iterable[Any], *, first_worker: int) -> None:
    """Make an idle torch `iterator` hand out these batches of indices.

    Args:
        iterator: An iterator in an empty pass, whose workers wait.
        indices: The first goes to `first_worker`, each following one to the next worker.
        first_worker: Taken modulo the number of workers; without workers it has no effect.
    """
    iterator._sampler_iter = iter(indices)
    workers = iterator._num_workers
    for _ in range(first_worker % workers if workers else 0):
        next(iterator._worker_queue_idx_cycle)
    for _ in range(workers * iterator._prefetch_factor if workers else 0):
        iterator._try_put_index()


def extend_loader(loader: Any, mixin: type, **attributes: Any) -> Any:
    """Return `loader` as an object of a class derived from `mixin` and its own class. Both objects share attributes."""
    kind = type(loader)
    extended: Any = object.__new__(type(kind.__name__, (mixin, kind), {"__module__": kind.__module__}))
    object.__setattr__(extended, "__dict__", vars(loader))
    vars(extended).update(attributes)
    return extended


class _Delivery(NamedTuple):
    """A batch on its way from a worker; a named tuple, because torch can then pin the members one by one."""

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
    """The collate function of a worker; attaches the worker's random states to each batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._sent: bytes | None = None
        self._generators: list[Any] = []

    def begin(self, state: Any) -> None:
        """Continue from `state`; None leaves the random numbers as torch and `worker_init_fn` have seeded them."""
        self._find_generators()
        if state is not None:
            own = state["own"]
            if len(own) != len(self._generators):
                log.warning(
                    "The dataset held %d generators of random numbers in this worker and now holds %d, so their states "
                    "are not restored. Make generators in `__init__` or in `worker_init_fn`.",
                    len(own),
                    len(self._generators),
                )
            _restore_random_states(state, self._generators if len(own) == len(self._generators) else ())
        self._sent = pickle.dumps(_random_states(self._generators))

    def __call__(self, rows: Any) -> _Delivery:
        batch, info = self._collate(rows), get_worker_info()
        assert info is not None
        if not self._generators:
            self._find_generators()  # the first rows may have made some
        states = _random_states(self._generators)
        before, self._sent = self._sent, pickle.dumps(states)
        return _Delivery(batch, info.id, None if self._sent == before else states)

    def _find_generators(self) -> None:
        info = get_worker_info()
        self._generators = held_generators(info.dataset if info is not None else None, self._collate)


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
    """Restore a result of `_random_states`; parts of it may be absent."""
    if "python" in states:
        set_state(random, states["python"])
        np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    for generator, state in zip(generators, states["own"], strict=False):
        set_state(generator, state)
