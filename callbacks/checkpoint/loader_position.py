"""A plain ``DataLoader`` that continues in the middle of an epoch.

The loader, with workers, shuffling and all, gives the batches that a plain loop gets from it. What is added is its
position: the random state from which the sampler drew the order of the epoch, and the number of batches taken. A resume
draws that order again and skips their rows without reading them. The random states of workers are part of the position.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

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

from ...adapter.contract.exceptions import InputError
from ...adapter.plumbing.devices import isolated_random_numbers
from ..lightning_internals import DataFetcher, FitLoop, TrainingEpochLoop, load_loader_states, require_names
from .sharded.rank_channel import Channel
from .worker_states import WorkerStates, own_generators, set_state, state_of

__all__ = [
    "begin_and_leave",
    "forget_positions",
    "generators_of",
    "keep_positions",
    "put_positions_back",
    "set_positions_aside",
    "set_up_data",
    "warn_of_lost_positions",
    "with_position",
]

log = logging.getLogger(__name__)

_POSITIONS = "loader_positions"
_IS_EARLY = "data_is_set_up_early"
"""The member of a loop whose data was set up before its state was restored."""
_BEGUN = "epoch_begun_with"
"""The member of a position that no other state of a loader has."""
WORKERS = "workers"
"""The member of a loader's state that ranks do not have alike: states of its workers and of its dataset."""

require_names("torch", _MultiProcessingDataLoaderIter, "_try_put_index", "_prefetch_factor")

_SAME_ON_ALL_RANKS = (SequentialSampler, DistributedSampler)
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def with_position(loader: Any, world_size: int) -> Any:
    """`loader` with a position, if it is a plain ``DataLoader`` over rows whose order torch decides; else as it is.

    On several ranks a checkpoint has one position for all of them, so that ranks which draw orders of their own have
    none.
    """
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
    """Have Lightning's own loop use the training loaders of `trainer` with positions, from the next fit on.

    Args:
        trainer: The loop of a trainer class does all of this itself.
        before_first_batch: Called when an epoch begins, before the loop takes a batch, which may draw random numbers.
        before_iterators: Called once the loaders exist and have their positions.
    """
    loop = trainer.fit_loop
    if type(loop) is not FitLoop:
        return
    if loop._combined_loader is not None:  # a callback asked for the loaders in its `setup`, and got them as they are
        loop._combined_loader.reset()
        loop._combined_loader = None

    def load_states() -> None:  # the last that Lightning does before it makes iterators
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
        if not loop.restarting or loop.epoch_loop.batch_progress.is_last_batch:
            begin_and_leave(positioned)
        before_iterators(trainer)

    def on_run_start(fetcher: DataFetcher) -> None:
        TrainingEpochLoop.on_run_start(loop.epoch_loop, fetcher)
        before_first_batch(trainer)

    vars(loop)["_load_combined_loader_states"] = load_states
    vars(loop)["setup_data"] = functools.partial(set_up_data, loop, functools.partial(FitLoop.setup_data, loop))
    loop.epoch_loop.on_run_start = on_run_start  # type: ignore[assignment, method-assign]


def set_up_data(loop: FitLoop, set_up: Callable[[], None]) -> None:
    """Set up the data of `loop` by `set_up`, also if somebody asks for it before the state of the loop is restored.

    ``trainer.estimated_stepping_batches``, which schedules need, does so in `configure_optimizers`.
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


def forget_positions(trainer: pl.Trainer) -> None:
    """End what `keep_positions` began."""
    for name in ("_load_combined_loader_states", "setup_data", _IS_EARLY):
        vars(trainer.fit_loop).pop(name, None)
    trainer.fit_loop.epoch_loop.__dict__.pop("on_run_start", None)


def is_stateful(loader: Any) -> bool:
    """Whether `loader` keeps a position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def set_positions_aside(
    trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any], channel: Channel
) -> None:
    """Move what genlight adds to the states of loaders in `checkpoint` to `parts`, which are genlight's. Collective.

    A Trainer without `keep_positions`, whose loaders are plain, refuses states that none of its loaders takes.
    """
    if _POSITIONS in parts:
        return  # moved already, if two callbacks save into folders of their own
    of_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = of_loop.get("combined_loader", [])
    workers = [state.pop(WORKERS, None) if _is_ours(state) else None for state in states]
    if any(workers):
        parts[WORKERS] = channel.gather(workers)
    parts[_POSITIONS] = []
    if type(trainer.fit_loop) is FitLoop:
        parts[_POSITIONS] = [(index, state) for index, state in enumerate(states) if _is_ours(state)]
        of_loop["combined_loader"] = [state for state in states if not _is_ours(state)]


def put_positions_back(trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any]) -> None:
    """Give what `set_positions_aside` has moved to the loop of `trainer`, before it is restored."""
    states = checkpoint["loops"]["fit_loop"]["state_dict"].setdefault("combined_loader", [])
    for index, state in parts.pop(_POSITIONS, ()) if type(trainer.fit_loop) is FitLoop else ():
        states.insert(index, state)
    of_ranks, rank = parts.pop(WORKERS, []), trainer.global_rank
    for state, workers in zip(states, of_ranks[rank] if rank < len(of_ranks) else (), strict=False):
        if workers is not None:
            state[WORKERS] = workers


def _is_ours(state: Any) -> bool:
    return isinstance(state, dict) and _BEGUN in state


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that `loaders` and their samplers were given, each once, in the order of the loaders.

    A loader of torchdata keeps its position, but not what its iterator drew from such a generator beside the order.
    """
    holders = (holder for loader in loaders for holder in (loader, getattr(loader, "sampler", None)))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def warn_of_lost_positions(trainer: pl.Trainer, *, is_within_epoch: bool) -> None:
    """Say what the training loaders cannot restore, and name those without a state, which begin with their first batch.

    A loader whose ``begins_anew`` is true does so on purpose. Its ``lost_on_resume``, if it has one, says what is lost.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:  # a list of batches is one loader
        lost, begins_anew = getattr(loader, "lost_on_resume", None), getattr(loader, "begins_anew", False)
        if lost is not None and (is_within_epoch or not begins_anew):
            log.warning("%s", lost)
        if is_within_epoch and not begins_anew and not is_stateful(loader):
            log.warning(
                "The run continues within an epoch, but its %s keeps no position: it begins with its first batch. "
                "Use torchdata.stateful_dataloader.StatefulDataLoader (`pip install torchdata`), which takes the same "
                "arguments, give yours `state_dict` and `load_state_dict`, or save between epochs.",
                type(loader).__name__,
            )


def begin_and_leave(loaders: Iterable[Any]) -> None:
    """Have loaders take up their position behind the last batch of an epoch, so that the next pass is a new one.

    There may be batches left, if ``limit_train_batches`` or a shorter loader beside them ended the epoch.
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
        loader: What it is made of. Workers that `loader` has started already are not used.
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
        """The state of workers and dataset that the first pass after a resume continues with."""
        self.lost_on_resume: str | None = None
        """The reason why random numbers of workers cannot be restored, for a warning."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # All of this at the first batch, as in a plain loop. Lightning makes iterators earlier, and does not use some.
        restored, self._to_restore = self._to_restore or {}, None
        for generator, state in zip(self._own_generators(), restored.get("own", ()), strict=False):
            set_state(generator, state)
        order: Iterator[Any] = iter(())
        if self._resumes and self._begun is not None:
            batches, order = self._rest(self._begun, restored)
        else:
            if self.persistent_workers and restored.get("started") is not None:
                self._iterator = self._start(restored)
            batches = self._whole_pass()
        self._resumes = False
        for delivery in batches:
            batch = self._workers.take(delivery)
            self._batches += 1
            yield batch
        next(order, None)
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

    def _rest(self, begun: Mapping[str, Any], restored: Mapping[str, Any]) -> tuple[Any, Iterator[Any]]:
        """The batches of an epoch that follow on those taken, and the iterator of the sampler that ordered them."""
        # No further than to the last one: a sampler of torch that is asked for more rows than it has draws again.
        order, left = self._ordered(begun, self._batches, len(self._index_source))
        batches = self._start({"started": begun, **restored})
        # Each worker gets the batches that it would have got, and keeps its part in later epochs.
        hand_out(batches, left, first_worker=self._batches)
        if self.persistent_workers:
            self._iterator = batches
        return batches, order

    def _ordered(self, begun: Mapping[str, Any], first: int, end: int) -> tuple[Iterator[Any], list[Any]]:
        """The rows of the batches from `first` to `end` of an epoch; generators are as after they were drawn."""
        with isolated_random_numbers():
            self._set_random_states(begun)
            if self._is_seeded:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            order = iter(self._index_source)
            return order, list(islice(order, first, end))

    def _start(self, restored: Mapping[str, Any]) -> Any:
        """An iterator whose workers continue from `restored`. Its first pass has no batches, the next ones have all."""
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
            prefetched = self.num_workers * (self.prefetch_factor or 0)
            _, rows = self._ordered(self._begun, self._batches, self._batches + prefetched)
            if self.persistent_workers:  # they had these batches to make
                self._iterator = self._start({"started": self._begun, **(self._to_restore or {})})
                hand_out(self._iterator, rows, first_worker=self._batches)
                self._to_restore = None
        self._resumes = False

    @property
    def _index_source(self) -> Any:
        """The sampler that decides which rows each batch has."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def _random_states(self) -> dict[str, Any]:
        states = [generator.get_state() for generator in generators_of([self])]
        return {"torch": torch.get_rng_state(), "generators": states}

    def _set_random_states(self, states: Mapping[str, Any]) -> None:
        torch.set_rng_state(states["torch"].cpu())
        for generator, state in zip(generators_of([self]), states["generators"], strict=True):
            generator.set_state(state.cpu())

    def _own_generators(self) -> list[Any]:
        """The generators that the dataset and the collate function hold, if they are called in this process."""
        if self.num_workers:
            return []
        known = {id(generator) for generator in generators_of([self])}
        return [each for each in own_generators(self.dataset, self.collate_fn) if id(each) not in known]

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint; its member `WORKERS` may differ between ranks."""
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
            "own": [state_of(generator) for generator in self._own_generators()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that were taken.

        Raises:
            InputError: The loader has another number of rows on this rank, or orders or batches them otherwise.
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


class _HeldBack:
    """A sampler that gives nothing at first, so that workers can be started without work."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.are_held_back = True

    def __iter__(self) -> Iterator[Any]:
        return iter(() if self.are_held_back else self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def hand_out(iterator: Any, indices: Iterable[Any], *, first_worker: int) -> None:
    """Have an `iterator` of torch that has no work hand out these batches of indices.

    Args:
        iterator: It is in an empty pass.
        indices: The first goes to `first_worker`, counted around, the next to the worker after it.
        first_worker: Of as many workers as there are; without workers it has no effect.
    """
    iterator._sampler_iter = iter(indices)
    workers = iterator._num_workers
    for _ in range(first_worker % workers if workers else 0):
        next(iterator._worker_queue_idx_cycle)
    for _ in range(workers * iterator._prefetch_factor if workers else 0):
        iterator._try_put_index()
