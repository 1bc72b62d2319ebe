"""Give the training loaders of Lightning's own loop a position, save it in checkpoints, and restore it in a resume."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from ...adapter.plumbing.devices import isolated_random_numbers
from ..lightning_internals import (
    DataFetcher,
    FitLoop,
    PrefetchDataFetcher,
    ProcessedTracker,
    TrainingEpochLoop,
    batches_of_loaders,
    load_loader_states,
)
from ..rank_channel import Channel
from .codec.tensors import is_storable
from .positioned_loader import (
    WORKERS,
    KeepsWorkers,
    PositionedLoader,
    extend_loader,
    is_own_position,
    is_stateful,
    with_position,
    without_order,
)

log = logging.getLogger(__name__)

_POSITIONS = "loader_positions"
_IS_EARLY = "data_is_set_up_early"
"""Attribute of a loop whose data was set up before its state was restored."""
_FETCHED = "fetched_batches"
"""Key in a checkpoint and attribute of a loop: the batches of each rank that Lightning has fetched ahead."""
_ENDED = "ended_loaders"
"""Key in a checkpoint and attribute of a loop: which of several loaders have already ended in the epoch."""


def keep_positions(
    trainer: pl.Trainer,
    before_first_batch: Callable[[pl.Trainer], None],
    before_iterators: Callable[[pl.Trainer], None],
) -> None:
    """Make Lightning's own loop use training loaders with positions from the next fit on.

    Args:
        trainer: Its loop must be Lightning's own; the loop of a trainer class does all of this itself.
        before_first_batch: Called when an epoch begins, before its first batch is fetched: this may draw random
            numbers.
        before_iterators: Called once the loaders exist and have their positions, before Lightning makes iterators.
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
        found = [with_position(loader) for loader in combined.flattened]
        positioned = [loader for loader in found if isinstance(loader, PositionedLoader)]
        if positioned:
            combined.flattened = found
        if trainer.ckpt_path is not None and not loop._loaded_from_state_dict:
            return  # Lightning calls this again after it has restored the checkpoint
        states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        if states and loop.restarting:
            load_loader_states(combined, states)
        elif states:  # between epochs Lightning loads no states, but persistent workers have one
            stateful = [loader for loader in found if is_stateful(loader)]
            for loader, state in zip(stateful, states, strict=False):
                if isinstance(loader, PositionedLoader):
                    loader.load_state_dict(state)
        fetched = loop.__dict__.pop(_FETCHED, [])
        if not loop.restarting or loop.epoch_loop.batch_progress.is_last_batch:
            skip_to_next_epoch(positioned)
        elif fetched is None and trainer.is_global_zero:
            log.warning(
                "The batch after the checkpoint is lost. Lightning had fetched it to know whether the batch before it "
                "was the last one of a loader without length. The checkpoint does not contain it, because its type "
                "cannot be stored or this rank did not exist. Give the loader `__len__`."
            )
        elif fetched:
            _give_back(combined, found, fetched)
        _restore_epoch(loop)
        before_iterators(trainer)

    def on_run_start(fetcher: DataFetcher) -> None:
        TrainingEpochLoop.on_run_start(loop.epoch_loop, fetcher)
        before_first_batch(trainer)

    vars(loop)["_load_combined_loader_states"] = load_states
    vars(loop)["setup_data"] = functools.partial(set_up_data, loop, functools.partial(FitLoop.setup_data, loop))
    loop.epoch_loop.on_run_start = on_run_start  # type: ignore[assignment, method-assign]


def _give_back(combined: CombinedLoader, loaders: list[Any], fetched: list[Any]) -> None:
    """Have the next pass of `combined`, over `loaders`, begin with batches that Lightning had `fetched` before."""
    parts = [batches_of_loaders(combined, batch) for batch in fetched]
    combined.flattened = [
        extend_loader(loader, _GivesBack, given_back=list(batches))
        for loader, batches in zip(loaders, zip(*parts, strict=True), strict=True)
    ]


def _restore_epoch(loop: FitLoop) -> None:
    """Correct the epoch in which Lightning continues from a checkpoint that was saved after an epoch, such as `final`.

    If the data ended, the next epoch has all its batches. If the step limit ended the epoch, the same epoch continues.
    """
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    if not loop.restarting or not 0 < epochs.current.ready == epochs.current.completed or not batches.current.ready:
        return
    if batches.is_last_batch:  # the fit loop's setter would store True if `max_steps` is set
        loop._restarting = loop.epoch_loop.restarting = False
    else:
        for counters in (epochs.current, epochs.total):
            assert isinstance(counters, ProcessedTracker)
            counters.processed = counters.completed = counters.ready - 1


def set_up_data(loop: FitLoop, set_up: Callable[[], None]) -> None:
    """Set up the data of `loop` by `set_up`, even if that is needed before the state of the loop is restored.

    ``trainer.estimated_stepping_batches``, which schedules need, asks for the data in `configure_optimizers`.
    """
    is_restored = loop._loaded_from_state_dict
    if loop._combined_loader is None and loop.trainer.ckpt_path is not None and not is_restored:
        with isolated_random_numbers():  # these iterators are not used: the next call, after the restore, makes others
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


def set_positions_aside(
    trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any], channel: Channel
) -> None:
    """Move genlight's additions to the states of loaders from `checkpoint` to `parts`. Collective.

    A Trainer without `keep_positions` would refuse states that none of its plain loaders can load.
    """
    if _POSITIONS in parts:
        return  # another `Checkpoint` of this trainer has moved them
    loop_state = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = loop_state.get("combined_loader", [])
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
        parts[_POSITIONS] = [(index, state) for index, state in enumerate(states) if is_own_position(state)]
        loop_state["combined_loader"] = [state for state in states if not is_own_position(state)]


def put_positions_back(trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any]) -> None:
    """Move the states back that `set_positions_aside` has moved, before the loop of `trainer` is restored."""
    states, rank = checkpoint["loops"]["fit_loop"]["state_dict"].setdefault("combined_loader", []), trainer.global_rank
    for index, state in parts.pop(_POSITIONS, ()) if type(trainer.fit_loop) is FitLoop else ():
        states.insert(index, state)
    if type(trainer.fit_loop) is FitLoop:
        fetched = parts.pop(_FETCHED, [[]])
        trainer.fit_loop.__dict__[_FETCHED] = fetched[rank] if rank < len(fetched) else None
    trainer.fit_loop.__dict__[_ENDED] = parts.pop(_ENDED, None)
    workers_by_rank = parts.pop(WORKERS, [])
    for state, workers in zip(states, workers_by_rank[rank] if rank < len(workers_by_rank) else (), strict=False):
        if workers is not None:
            is_other_share = len(workers_by_rank) != trainer.world_size and is_own_position(state)
            state[WORKERS] = without_order(workers) if is_other_share else workers


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
    return batches if is_storable(batches) else None


def warn_of_lost_positions(trainer: pl.Trainer, *, is_within_epoch: bool) -> None:
    """Warn of what the training loaders cannot restore, and of loaders that have no state and so start again.

    A loader may have ``lost_on_resume``, the text of a warning, and ``begins_anew``: if true, it starts again on
    purpose.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:  # a list of batches is one loader
        lost, begins_anew = getattr(loader, "lost_on_resume", None), getattr(loader, "begins_anew", False)
        if lost is not None and (is_within_epoch or not begins_anew):
            log.warning("%s", lost)
        keeps_no_workers = isinstance(loader, DataLoader) and not isinstance(loader, PositionedLoader | KeepsWorkers)
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


def skip_to_next_epoch(loaders: Iterable[Any]) -> None:
    """Move loaders past the last batch of an epoch, so that the next pass is a new one.

    Batches may be left if ``limit_train_batches`` or a shorter loader ended the epoch.
    """
    with isolated_random_numbers():
        for loader in loaders:
            if isinstance(loader, PositionedLoader):
                loader.leave_epoch()
            else:
                next(iter(loader), None)


class _GivesBack:
    """A loader whose next pass begins with batches that were already fetched from it."""

    given_back: list[Any]

    def __iter__(self) -> Iterator[Any]:
        first, self.given_back = self.given_back, []
        return chain(first, super().__iter__())  # type: ignore[misc]
