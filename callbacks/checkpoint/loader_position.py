"""A plain ``DataLoader`` that goes on in the middle of an epoch.

A loader with workers, shuffling and all stays what it is, and hands out what a plain loop gets from it. What is added
is its position: the random state with which the epoch was begun, which the sampler drew the order from, and how many
batches were taken. A resume draws that order again and leaves out their rows without reading them.
"""

from __future__ import annotations

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
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from ...adapter.contract.exceptions import InputError
from ...adapter.plumbing.devices import isolated_random_numbers
from ..lightning_internals import FitLoop

__all__ = [
    "begin_and_leave",
    "forget_positions",
    "generators_of",
    "keep_positions",
    "put_positions_back",
    "set_positions_aside",
    "warn_of_loaders_without_position",
    "with_position",
]

log = logging.getLogger(__name__)

_POSITIONS = "loader_positions"
_BEGUN = "epoch_begun_with"
"""The member of a position that no other state of a loader has."""

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
    return PositionedLoader(loader) if is_plain and type(loader.sampler) in kinds else loader


def keep_positions(
    trainer: pl.Trainer, at_first_batch: Callable[[pl.Trainer], None], before_iterators: Callable[[pl.Trainer], None]
) -> None:
    """Have Lightning's own loop use the training loaders of `trainer` with positions, from the next fit on.

    Args:
        trainer: Before its loop has set up data. A loop of another class does it itself.
        at_first_batch: Called before a loader takes the first batch of a pass, which may draw random numbers.
        before_iterators: Called once the loaders are there and have their positions.
    """
    loop = trainer.fit_loop
    if type(loop) is not FitLoop:
        return

    def load_states() -> None:  # the last that Lightning does before it makes iterators
        combined = loop._combined_loader
        assert combined is not None
        found = [with_position(loader, trainer.world_size) for loader in combined.flattened]
        positioned = [loader for loader in found if isinstance(loader, PositionedLoader)]
        if positioned:
            combined.flattened = found
        for loader in positioned:
            loader.at_first_batch = functools.partial(at_first_batch, trainer)
        FitLoop._load_combined_loader_states(loop)
        if loop.restarting and loop.epoch_loop.batch_progress.is_last_batch:
            begin_and_leave(positioned)
        before_iterators(trainer)

    vars(loop)["_load_combined_loader_states"] = load_states


def forget_positions(trainer: pl.Trainer) -> None:
    """End what `keep_positions` began."""
    vars(trainer.fit_loop).pop("_load_combined_loader_states", None)


def set_positions_aside(trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any]) -> None:
    """Move the positions from what Lightning's own loop has put into `checkpoint` to `parts`, which are ours.

    A Trainer without `keep_positions`, whose loaders are plain, refuses states that no loader of its takes.
    """
    if type(trainer.fit_loop) is not FitLoop or _POSITIONS in parts:
        return  # moved already, where two callbacks save into folders of their own
    of_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = of_loop.get("combined_loader", [])
    parts[_POSITIONS] = [(index, state) for index, state in enumerate(states) if _BEGUN in state]
    of_loop["combined_loader"] = [state for state in states if _BEGUN not in state]


def put_positions_back(trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any]) -> None:
    """Give the positions that `set_positions_aside` has moved to the loop of `trainer`, before it is restored."""
    if _POSITIONS not in parts or type(trainer.fit_loop) is not FitLoop:
        return
    states = checkpoint["loops"]["fit_loop"]["state_dict"].setdefault("combined_loader", [])
    for index, state in parts.pop(_POSITIONS):
        states.insert(index, state)


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that `loaders` and their samplers were given, each once, in the order of the loaders.

    A loader of torchdata keeps its position, but not what its iterator drew from such a generator beside the order.
    """
    holders = (holder for loader in loaders for holder in (loader, getattr(loader, "sampler", None)))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def warn_of_loaders_without_position(trainer: pl.Trainer) -> None:
    """Name the training loaders that have no state, so that they begin with their first batch again.

    One whose ``begins_anew`` is true does so on purpose; its ``lost_on_resume``, where it has that, says what is lost.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:  # a list of batches is one loader
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if getattr(loader, "begins_anew", False):
            lost = getattr(loader, "lost_on_resume", None)
            if lost is not None:
                log.warning("%s", lost)
        elif not is_stateful:
            log.warning(
                "The run goes on within an epoch, but its %s keeps no position: it begins with its first batch again. "
                "Use torchdata.stateful_dataloader.StatefulDataLoader (`pip install torchdata`), which takes the same "
                "arguments, give yours `state_dict` and `load_state_dict`, or save between epochs.",
                type(loader).__name__,
            )


def begin_and_leave(loaders: Iterable[Any]) -> None:
    """Have loaders take up their position behind the last batch of an epoch, so that the next pass begins anew.

    There may be batches left, where ``limit_train_batches`` or a shorter loader beside them ended the epoch.
    """
    with isolated_random_numbers():
        for loader in loaders:
            next(iter(loader), None)


class PositionedLoader(DataLoader[Any]):
    """A ``DataLoader`` with the position that a checkpoint holds.

    What a dataset draws in this process is exact too after a resume. Worker processes are seeded as when the epoch was
    begun, and have drawn nothing for the rows that are left out.

    Args:
        loader: What it is made of; the two share workers.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self._begun: dict[str, Any] | None = None
        """Random states with which the epoch was begun; None between epochs."""
        self._batches = 0
        self._resumes = False
        self.at_first_batch: Callable[[], None] = lambda: None

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # All at the first batch, as in a plain loop: Lightning makes an iterator before that, which it does not use.
        self.at_first_batch()
        if self._resumes and self._begun is not None:
            batches = self._rest(self._begun)
        else:
            states = [each.get_state() for each in generators_of([self])]
            self._begun, self._batches = {"torch": torch.get_rng_state(), "generators": states}, 0
            batches = super().__iter__()
        self._resumes = False
        for batch in batches:
            self._batches += 1
            yield batch
        self._begun, self._batches = None, 0

    def _rest(self, begun: Mapping[str, Any]) -> Iterator[Any]:
        generators = generators_of([self])
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        sampler: Any = getattr(self, name)

        def begin() -> None:
            torch.set_rng_state(begun["torch"].cpu())
            for generator, state in zip(generators, begun["generators"], strict=True):
                generator.set_state(state.cpu())

        with isolated_random_numbers():
            begin()
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # the seed of workers comes first
            order = iter(sampler)
            # No further than to the last one: a sampler of torch that is asked for more rows than it has draws again.
            left = list(islice(order, self._batches, len(sampler)))
            drawn = [generator.get_state() for generator in generators]
            begin()
            rest: DataLoader[Any] = object.__new__(DataLoader)
            vars(rest).update(vars(self) | {name: left, "persistent_workers": False})
            batches = iter(rest)
        for generator, state in zip(generators, drawn, strict=True):
            generator.set_state(state)
        yield from batches
        next(order, None)

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint."""
        return {
            _BEGUN: self._begun,
            "batches": self._batches,
            "rows": len(self.sampler),  # type: ignore[arg-type]
            "batch_size": self.batch_size,
            "sampler": type(self.sampler).__name__,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that were taken.

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
        self._resumes = self._begun is not None
