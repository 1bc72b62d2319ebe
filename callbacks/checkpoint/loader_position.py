"""A plain ``DataLoader`` that continues in the middle of an epoch.

The loader yields the same batches as in a plain loop, including workers and shuffling. Its position is added: the
random state from which the sampler drew the order of the epoch, and the number of batches taken. A resume draws that
order again and skips the rows of those batches without reading them. The random states of workers belong to it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from ...adapter.contract.exceptions import InputError, UnstorableStateError
from ...adapter.plumbing.devices import isolated_random_numbers
from ...adapter.plumbing.generators import set_state
from ..lightning_internals import (
    DataFetcher,
    FitLoop,
    PrefetchDataFetcher,
    ProcessedTracker,
    TrainingEpochLoop,
    batches_of_loaders,
    load_loader_states,
    require_names,
)
from .codec.state_tree import encode
from .codec.tensors import TensorTable
from .sharded.rank_channel import Channel
from .worker_states import WorkerStates, own_generators, state_as_arrays

log = logging.getLogger(__name__)

_POSITIONS = "loader_positions"
_IS_EARLY = "data_is_set_up_early"
"""Attribute of a loop whose data was set up before its state was restored."""
_BEGUN = "epoch_begun_with"
"""Key that only positions made here have."""
WORKERS = "genlight_workers"
"""Key in a loader's state for the states of its workers and its dataset, which differ between ranks."""
_FETCHED = "fetched_batches"
"""Key in a checkpoint and attribute of a loop: the batches of each rank that Lightning has fetched ahead."""
_ENDED = "ended_loaders"
"""Key in a checkpoint and attribute of a loop: which of several loaders have already ended in the epoch."""

require_names("torch", _MultiProcessingDataLoaderIter, "_try_put_index", "_prefetch_factor")

_SAME_ON_ALL_RANKS = (SequentialSampler, DistributedSampler)
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def with_position(loader: Any, world_size: int) -> Any:
    """Return `loader` with a position if it is a plain ``DataLoader`` over rows whose order torch decides.

    Any other loader is returned unchanged. On several ranks a checkpoint has one position for all of them, so loaders
    whose order differs between ranks get none. Loaders of torchdata have a position; they also keep the random states
    of their workers.
    """
    if any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(loader).__mro__):
        return loader if isinstance(loader, _KeepsWorkers) else _derived(loader, _KeepsWorkers)
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return loader
    kinds = _SAME_ON_ALL_RANKS if world_size > 1 else (*_SAME_ON_ALL_RANKS, *_DRAW_FROM_TORCH)
    is_plain = type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None
    is_in_order = loader.in_order or loader.num_workers < 2
    return PositionedLoader(loader) if is_plain and is_in_order and type(loader.sampler) in kinds else loader


def keep_positions(
    trainer: pl.Trainer,
    before_first_batch: Callable[[pl.Trainer], None],
    before_iterators: Callable[[pl.Trainer], None],
) -> None:
    """Make Lightning's own loop use training loaders with positions from the next fit on.

    Args:
        trainer: Its loop must be Lightning's own; the loop of a trainer class does all of this itself.
        before_first_batch: Called when an epoch begins, before the first batch, which may draw random numbers.
        before_iterators: Called once the loaders exist and have their positions.
    """
    loop = trainer.fit_loop
    if type(loop) is not FitLoop:
        return
    if loop._combined_loader is not None:  # made earlier, for the `setup` of a callback
        loop._combined_loader.reset()
        loop._combined_loader = None

    def load_states() -> None:  # the last step of Lightning before it makes iterators
        combined = loop._combined_loader
        assert combined is not None
        found = [with_position(loader, trainer.world_size) for loader in combined.flattened]
        positioned = [loader for loader in found if isinstance(loader, PositionedLoader)]
        if positioned:
            combined.flattened = found
        if trainer.ckpt_path is not None and not loop._loaded_from_state_dict:
            return  # called again once it is restored
        states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        if states and loop.restarting:
            load_loader_states(combined, states)
        elif states:  # between epochs, where Lightning loads none: persistent workers have a state there
            stateful = [loader for loader in found if is_stateful(loader)]
            for loader, state in zip(stateful, states, strict=False):
                if isinstance(loader, PositionedLoader):
                    loader.load_state_dict(state)
        fetched = loop.__dict__.pop(_FETCHED, [])
        if not loop.restarting or loop.epoch_loop.batch_progress.is_last_batch:
            begin_and_leave(positioned)
        elif fetched is None and trainer.is_global_zero:
            log.warning(
                "The batch after the checkpoint is lost. Lightning had fetched it to know whether the batch before it "
                "was the last one of a loader without length. The checkpoint does not contain it, because its type "
                "cannot be stored or this rank did not exist. Give the loader `__len__`."
            )
        elif fetched:
            parts = [batches_of_loaders(combined, batch) for batch in fetched]
            combined.flattened = [
                _derived(loader, _GivesBack, given_back=list(batches))
                for loader, batches in zip(found, zip(*parts, strict=True), strict=True)
            ]
        _restore_epoch(loop)
        before_iterators(trainer)

    def on_run_start(fetcher: DataFetcher) -> None:
        TrainingEpochLoop.on_run_start(loop.epoch_loop, fetcher)
        before_first_batch(trainer)

    vars(loop)["_load_combined_loader_states"] = load_states
    vars(loop)["setup_data"] = functools.partial(set_up_data, loop, functools.partial(FitLoop.setup_data, loop))
    loop.epoch_loop.on_run_start = on_run_start  # type: ignore[assignment, method-assign]


def _restore_epoch(loop: FitLoop) -> None:
    """Correct what Lightning's loop makes of a checkpoint that was saved after its last epoch had ended, as `final` is.

    If the data ended, the next epoch has all its batches. If the step limit ended the epoch, the same epoch continues.
    """
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    if not loop.restarting or not 0 < epochs.current.ready == epochs.current.completed or not batches.current.ready:
        return
    if batches.is_last_batch:  # under `max_steps`, the setter of the fit loop makes True of False
        loop._restarting = loop.epoch_loop.restarting = False
    else:
        for counters in (epochs.current, epochs.total):
            assert isinstance(counters, ProcessedTracker)
            counters.processed = counters.completed = counters.ready - 1


def set_up_data(loop: FitLoop, set_up: Callable[[], None]) -> None:
    """Set up the data of `loop` by `set_up`, also before the state of the loop is restored.

    ``trainer.estimated_stepping_batches``, which schedules need, asks for the data in `configure_optimizers`.
    """
    is_restored = loop._loaded_from_state_dict
    if loop._combined_loader is None and loop.trainer.ckpt_path is not None and not is_restored:
        with isolated_random_numbers():  # the iterators of a resumed epoch are made below
            set_up()
        loop.__dict__[_IS_EARLY] = True
        return
    set_up()
    if is_restored and loop.__dict__.pop(_IS_EARLY, False):
        loop._load_combined_loader_states()
        if loop._data_fetcher is not None:
            iter(loop._data_fetcher)
    ended = loop.__dict__.pop(_ENDED, None) if is_restored else None
    if ended and loop._combined_loader is not None and not loop.epoch_loop.batch_progress.is_last_batch:
        vars(loop._combined_loader._iterator)["_consumed"] = list(ended)


def forget_positions(trainer: pl.Trainer) -> None:
    """Undo `keep_positions`."""
    for name in ("_load_combined_loader_states", "setup_data", _IS_EARLY, _FETCHED, _ENDED):
        vars(trainer.fit_loop).pop(name, None)
    trainer.fit_loop.epoch_loop.__dict__.pop("on_run_start", None)


def is_stateful(loader: Any) -> bool:
    """Whether `loader` keeps a position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def set_positions_aside(
    trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any], channel: Channel
) -> None:
    """Move genlight's additions to the states of loaders from `checkpoint` to `parts`. Collective.

    A Trainer without `keep_positions` would refuse states that none of its plain loaders can load.
    """
    if _POSITIONS in parts:
        return  # moved already, if two callbacks save into folders of their own
    of_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = of_loop.get("combined_loader", [])
    workers = [state.pop(WORKERS, None) if isinstance(state, dict) else None for state in states]
    if any(workers):
        parts[WORKERS] = channel.gather(workers)
    parts[_POSITIONS] = []
    ended = getattr(getattr(trainer.fit_loop._combined_loader, "_iterator", None), "_consumed", ())
    if any(ended) and not all(ended):
        parts[_ENDED] = list(ended)
    if type(trainer.fit_loop) is FitLoop:
        fetched = channel.gather(_fetched_ahead(trainer.fit_loop))
        if any(batches is None or batches for batches in fetched):
            parts[_FETCHED] = fetched
        parts[_POSITIONS] = [(index, state) for index, state in enumerate(states) if _is_ours(state)]
        of_loop["combined_loader"] = [state for state in states if not _is_ours(state)]


def put_positions_back(trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any]) -> None:
    """Move the states back that `set_positions_aside` has moved, before the loop of `trainer` is restored."""
    states, rank = checkpoint["loops"]["fit_loop"]["state_dict"].setdefault("combined_loader", []), trainer.global_rank
    for index, state in parts.pop(_POSITIONS, ()) if type(trainer.fit_loop) is FitLoop else ():
        states.insert(index, state)
    if type(trainer.fit_loop) is FitLoop:
        fetched = parts.pop(_FETCHED, [[]])
        trainer.fit_loop.__dict__[_FETCHED] = fetched[rank] if rank < len(fetched) else None
    trainer.fit_loop.__dict__[_ENDED] = parts.pop(_ENDED, None)
    of_ranks = parts.pop(WORKERS, [])
    for state, workers in zip(states, of_ranks[rank] if rank < len(of_ranks) else (), strict=False):
        if workers is not None:
            state[WORKERS] = workers


def _fetched_ahead(loop: FitLoop) -> list[Any] | None:
    """Return the batches that Lightning has fetched ahead from loaders without length; None if they cannot be stored.

    The positions of these loaders are after these batches.
    """
    fetcher, combined = loop._data_fetcher, loop._combined_loader
    if (
        not isinstance(fetcher, PrefetchDataFetcher)
        or combined is None
        or not all(map(is_stateful, combined.flattened))
    ):
        return []
    batches = [batch for batch, *_ in fetcher.batches]
    try:
        encode(batches, TensorTable())
    except UnstorableStateError:
        return None
    return batches


def _is_ours(state: Any) -> bool:
    return isinstance(state, dict) and _BEGUN in state


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators of `loaders` and their samplers, each once, in the order of the loaders.

    A loader of torchdata keeps its position, but not the further numbers that its iterator drew from such a generator.
    """
    holders = (holder for loader in loaders for holder in (loader, getattr(loader, "sampler", None)))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def warn_of_lost_positions(trainer: pl.Trainer, *, is_within_epoch: bool) -> None:
    """Warn of what the training loaders cannot restore, and of loaders without a state, which start again.

    A loader whose ``begins_anew`` is true starts again on purpose. Its ``lost_on_resume``, if set, is the warning.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:  # a list of batches is one loader
        lost, begins_anew = getattr(loader, "lost_on_resume", None), getattr(loader, "begins_anew", False)
        if lost is not None and (is_within_epoch or not begins_anew):
            log.warning("%s", lost)
        keeps_no_workers = isinstance(loader, DataLoader) and not isinstance(loader, PositionedLoader | _KeepsWorkers)
        if is_within_epoch and is_stateful(loader) and keeps_no_workers and loader.num_workers:
            log.warning(
                "Random numbers drawn in the workers of the %s differ from an uninterrupted run, because the state of "
                "this class does not include them.",
                type(loader).__name__,
            )
        if is_within_epoch and not begins_anew and not is_stateful(loader):
            log.warning(
                "The run continues within an epoch, but its %s keeps no position and starts with its first batch. "
                "Use torchdata.stateful_dataloader.StatefulDataLoader (`pip install torchdata`), which takes the same "
                "arguments, give yours `state_dict` and `load_state_dict`, or save between epochs.",
                type(loader).__name__,
            )


def begin_and_leave(loaders: Iterable[Any]) -> None:
    """Move loaders past the last batch of an epoch, so that the next pass is a new one.

    Batches may be left if ``limit_train_batches`` or a shorter loader ended the epoch.
    """
    with isolated_random_numbers():
        for loader in loaders:
            if isinstance(loader, PositionedLoader):
                loader.leave_epoch()
            else:
                next(iter(loader), None)


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
        for generator, state in zip(self._own_generators(), restored.get("own", ()), strict=False):
            set_state(generator, state)
        if self._resumes and self._begun is not None:
            batches = self._rest(self._begun, restored)
        else:
            if self.persistent_workers and restored.get("started") is not None:
                self._iterator = self._start(restored)
            batches = self._whole_pass()
        self._resumes = False
        for delivery in batches:
            batch = self._workers.take(delivery)
            self._batches += 1
            yield batch
        self._begun, self._batches = None, 0

    def _whole_pass(self) -> Iterator[Any]:
        self._begun, self._batches = self._random_states(), 0
        self._is_seeded = self._iterator is None
        if self._iterator is not None:
            # An epoch that was cut has left batches with the workers, which have drawn numbers for them. torch would
            # drop these batches, and an error in one of them does not concern this epoch.
            self._iterator._sampler_iter = iter(())
            for _ in range(self.num_workers * (self.prefetch_factor or 0)):
                with contextlib.suppress(Exception):
                    self._workers.take(next(self._iterator, None))
            return super().__iter__()
        self._started = self._begun
        with self._workers.attached(self):
            return super().__iter__()

    def _rest(self, begun: Mapping[str, Any], restored: Mapping[str, Any]) -> Iterator[Any]:
        """Return the remaining batches of an epoch."""
        order = self._order(begun)
        batches = self._start({"started": begun, **restored})
        # Each worker gets the same batches as in an uninterrupted run, also in later epochs.
        hand_out(batches, order, first_worker=self._batches)
        if self.persistent_workers:
            self._iterator = batches
        return cast("Iterator[Any]", batches)

    def _order(self, begun: Mapping[str, Any]) -> Iterator[Any]:
        """Return the order of an epoch without the batches already taken; generators end up as after those batches."""
        with isolated_random_numbers():
            self._set_random_states(begun)
            if self._is_seeded:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            order = iter(self._index_source)
            deque(islice(order, self._batches), maxlen=0)
            first = [] if self._batches else list(islice(order, 1))  # the order is drawn with its first item
        # Ask for no item earlier than an uninterrupted run: after its last one, a sampler of torch draws once more.
        return chain(first, order)

    def _start(self, restored: Mapping[str, Any]) -> Any:
        """Return an iterator whose workers continue from `restored`. Its first pass is empty, later ones complete."""
        before = [generator.get_state() for generator in generators_of([self])]
        self._started = restored["started"]
        loader: DataLoader[Any] = object.__new__(DataLoader)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        indices = _HeldBack(self._index_source)
        vars(loader).update(vars(self) | {name: indices, "_iterator": None})
        with isolated_random_numbers(), self._workers.attached(loader, restored.get("states", ())):
            self._set_random_states(restored["started"])
            iterator = iter(loader)
        indices.are_held_back = False
        for generator, state in zip(generators_of([self]), before, strict=True):
            generator.set_state(state)
        return iterator

    def leave_epoch(self) -> None:
        """Skip the rest of an epoch that was cut, so that the next pass is a new one."""
        if self._resumes and self._begun is not None:
            if self.persistent_workers:
                restored, self._to_restore = self._to_restore or {}, None
                self._rest(self._begun, restored)  # the workers had some of these batches to make
            else:
                prefetched = self.num_workers * (self.prefetch_factor or 0)
                deque(islice(self._order(self._begun), prefetched), maxlen=0)
        self._resumes = False

    @property
    def _index_source(self) -> Any:
        """The sampler that chooses the rows of each batch."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def _random_states(self) -> dict[str, Any]:
        states = [generator.get_state() for generator in generators_of([self])]
        return {"torch": torch.get_rng_state(), "generators": states}

    def _set_random_states(self, states: Mapping[str, Any]) -> None:
        torch.set_rng_state(states["torch"].cpu())
        for generator, state in zip(generators_of([self]), states["generators"], strict=True):
            generator.set_state(state.cpu())

    def _own_generators(self) -> list[Any]:
        """Return the generators of the dataset and the collate function, if these run in this process."""
        if self.num_workers:
            return []
        known = {id(generator) for generator in generators_of([self])}
        return [each for each in own_generators(self.dataset, self.collate_fn) if id(each) not in known]

    def state_dict(self) -> dict[str, Any]:
        """Return the position for a checkpoint; its entry `WORKERS` may differ between ranks."""
        return {
            _BEGUN: self._begun,
            "batches": self._batches,
            "rows": len(self.sampler),  # type: ignore[arg-type]
            "batch_size": self.batch_size,
            "sampler": type(self.sampler).__name__,
            "is_seeded": self._is_seeded,
            WORKERS: self._to_restore if self._to_restore is not None else self._state_of_workers(),
        }

    def _state_of_workers(self) -> dict[str, Any]:
        are_needed = self._begun is not None or self.persistent_workers
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.persistent_workers,
            "draws": self._workers.draws,
            "started": self._started if are_needed else None,
            "states": list(self._workers.states) if are_needed else [],
            "own": [state_as_arrays(generator) for generator in self._own_generators()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that were taken.

        Raises:
            InputError: The loader has another number of rows on this rank, another sampler or another batch size.
        """
        now = self.state_dict()
        names = [name for name in ("rows", "batch_size", "sampler") if state[name] != now[name]]
        if state[_BEGUN] is not None and names:
            changed = ", ".join(f"{name} was {state[name]} and is {now[name]}" for name in names)
            raise InputError(
                f"The position of the DataLoader does not fit it: {changed}. Resume with the dataset, the batch size, "
                "the sampler and the number of ranks of the checkpoint, or from a checkpoint between epochs."
            )
        self._begun, self._batches = state[_BEGUN], state["batches"]
        self._is_seeded = state.get("is_seeded", True)
        self._resumes = self._begun is not None
        self._load_state_of_workers(state.get(WORKERS))

    def _load_state_of_workers(self, saved: dict[str, Any] | None) -> None:
        self._to_restore, self.lost_on_resume = saved, None
        if saved is None:  # of an older release, or saved on fewer ranks
            return
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


def _derived(loader: Any, mixin: type, **attributes: Any) -> Any:
    """Return `loader` as an object of a class derived from `mixin` and its own class; both share all attributes."""
    kind = type(loader)
    derived: Any = object.__new__(type(kind.__name__, (mixin, kind), {"__module__": kind.__module__}))
    object.__setattr__(derived, "__dict__", vars(loader))
    vars(derived).update(attributes)
    return derived


class _GivesBack:
    """A loader whose next pass begins with batches that were already fetched from it."""

    given_back: list[Any]

    def __iter__(self) -> Iterator[Any]:
        first, self.given_back = self.given_back, []
        return chain(first, super().__iter__())  # type: ignore[misc]


class _KeepsWorkers(DataLoader[Any]):
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
            own = own_generators(self.dataset, self.collate_fn)
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
        own = [] if self.num_workers else own_generators(self.dataset, self.collate_fn)
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


class _HeldBack:
    """A sampler that is empty at first, so that workers start without work."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.are_held_back = True

    def __iter__(self) -> Iterator[Any]:
        return iter(() if self.are_held_back else self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def hand_out(iterator: Any, indices: Iterable[Any], *, first_worker: int) -> None:
    """Make a torch `iterator` without work hand out these batches of indices.

    Args:
        iterator: An iterator in an empty pass.
        indices: The first goes to `first_worker`, each following one to the next worker.
        first_worker: Taken modulo the number of workers; without workers it has no effect.
    """
    iterator._sampler_iter = iter(indices)
    workers = iterator._num_workers
    for _ in range(first_worker % workers if workers else 0):
        next(iterator._worker_queue_idx_cycle)
    for _ in range(workers * iterator._prefetch_factor if workers else 0):
        iterator._try_put_index()
