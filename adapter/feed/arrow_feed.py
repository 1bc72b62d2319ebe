"""The feed: record batches for one rank, in a reproducible order, with a position."""

from __future__ import annotations

import logging
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pyarrow as pa

from ..contract.exceptions import InputError
from ..plumbing.settings import faults_of
from .batching import Spec, Supply, ThreadSupply
from .epoch_order import Order
from .options import FeedOptions
from .position import Layout, Position
from .sources import Source, open_source

__all__ = ["ArrowFeed", "imported"]

log = logging.getLogger(__name__)


Collate: TypeAlias = Callable[[pa.RecordBatch], Any]


@dataclass(kw_only=True, eq=False, repr=False)
class ArrowFeed(FeedOptions):
    """An iterable of `pyarrow.RecordBatch`, this rank's share of each step.

    ``for batch in feed`` starts at the first row, or at the position that was loaded. With ``per_epoch`` one iteration
    is one epoch and the next iteration the next epoch, which is what Lightning's own loops expect of a loader; without
    it one iteration runs through all epochs.

    The position (`state_dict`) is that of the last batch handed out, whatever was decoded ahead. It is the same on all
    ranks and may be loaded on another number of ranks or with another batch size.

    Besides the arguments below it takes the fields of `FeedOptions`: how rows become batches. `collate` may be a
    function too, which is called with each record batch in the training thread.

    Args:
        source: Paths, folders, patterns or URLs of Parquet files; tables or record batches; a data frame (pandas,
            polars, …, read whole into memory); a `Source`.
        rank: Which share is ours.
        world_size: Number of shares.
        per_epoch: One iteration is one epoch.
        filesystem: A pyarrow or fsspec file system that all paths belong to; None finds it from each path.

    Raises:
        ValueError: Arguments cannot be used, or `collate` cannot be imported.
        TypeError: `collate` is no function.
    """

    source: Any = field(kw_only=False)
    rank: int = 0
    world_size: int = 1
    per_epoch: bool = False
    filesystem: Any = None

    def __post_init__(self) -> None:
        self._refuse_out_of_range()
        self.columns = None if self.columns is None else tuple(self.columns)
        self._collate = _collate_function(self.collate)
        runs_users_code = not self.workers and getattr(self._collate, "__module__", "") != f"{__package__}.collate"
        if self.copy_ahead and (self._collate is None or runs_users_code):
            raise ValueError(
                "Invalid `copy_ahead`. It needs batches of tensors made without code of yours in this process: "
                "`collate` 'torch', or any `collate` with `workers`."
            )
        self._source: Source | None = None
        self._layout: Layout | None = None
        self._position: Position | None = None
        self._step = 0
        self._loaded = False
        self._length: int | None = None
        self._supply: Supply | None = None
        self._waited = 0.0

    def _refuse_out_of_range(self) -> None:
        faults = faults_of(self, FeedOptions)
        if type(self.world_size) is not int or type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            given = f"{self.rank!r} of {self.world_size!r}"
            faults.append(f"Invalid `rank`. Expected 0 <= rank < `world_size`, but received {given}.")
        if faults:
            raise ValueError(" ".join(faults))

    # --- what the data is

    def check(self) -> None:
        """Read the metadata, once.

        Raises:
            InputError: Lists every error that metadata can tell, and that there are rows for every rank.
        """
        self._opened()

    @property
    def schema(self) -> pa.Schema:
        """Schema of every batch."""
        return self._opened()[0].schema

    @property
    def rows(self) -> int:
        """Rows of an epoch over all ranks."""
        return self._opened()[1].order.rows

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, equal on all ranks."""
        return self._opened()[1].steps_per_epoch

    def __len__(self) -> int:
        """Steps of one iteration from its start.

        Raises:
            TypeError: The feed repeats without end.
        """
        if self.per_epoch:
            self._length = self._steps_of_iteration()
            return self._length
        if self.epochs is None:
            raise TypeError("The feed repeats without end and has no length; give it `epochs`.")
        return self.steps_per_epoch * self.epochs

    def _steps_of_iteration(self) -> int:
        """Of an epoch, or more where the number of ranks or the batch size changed in the middle of the current one.

        Lightning ends an epoch when it has seen this many steps, those before a resume included. It asks once and
        takes the answer for all epochs, so that an answer too small would cut epochs short; one too large does no harm.
        """
        _, layout = self._opened()
        here = self._position or Position.start_of(0, layout.order)
        steps = [layout.share(pass_.rows).steps for pass_ in (here, here.following(layout))]
        return max(layout.steps_per_epoch, here.before + steps[0], steps[1])

    def _opened(self) -> tuple[Source, Layout]:
        if self._source is None or self._layout is None:
            source = open_source(self.source, columns=self.columns, filesystem=self.filesystem)
            layout = self._layout_of(source)
            self._say_short_batches(layout)
            self._source, self._layout = source, layout
        return self._source, self._layout

    def _layout_of(self, source: Source) -> Layout:
        """How the steps of an epoch share the rows of `source`.

        Raises:
            InputError: There are too few for a step.
        """
        order = Order(source.group_rows, self.seed, self.shuffle, self.shuffle_window)
        layout = Layout(order, self.batch_size, self.world_size, self.shard, self.drop_last)
        if not layout.steps_per_epoch:
            raise InputError(_too_few(layout))
        return layout

    def _say_short_batches(self, layout: Layout) -> None:
        """Say where the batch size that was asked for is not the one that is trained with."""
        share = layout.share(layout.order.rows)
        if self.rank or self.drop_last or not share.total % share.step_rows:
            return
        short = [share.consumed(step + 1) - share.consumed(step) for step in range(share.full_steps, share.steps)]
        text = f"an epoch of {share.total} rows has {share.full_steps} steps of {share.step_rows} rows"
        if short:
            text += f", then {' and '.join(map(str, short))}, which `drop_last` leaves out"
        if any(rows % self.world_size for rows in short):
            text += "; there some ranks have a row more, and the mean of each rank counts alike"
        if share.usable < share.total:
            text += f"; {share.total - share.usable} are too few for {self.world_size} ranks: the next epoch has them"
        log.log(logging.WARNING if share.total < share.step_rows else logging.INFO, text)

    # --- iteration

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self.per_epoch)

    def iter_batches(self) -> Iterator[Any]:
        """All batches of all epochs from the position on, whatever `per_epoch` says."""
        return self._iterate(per_epoch=False)

    def _iterate(self, per_epoch: bool) -> Iterator[Any]:
        _refuse_data_loader_workers()
        # Nothing is read before the first batch is asked for: Lightning calls iter() to see whether it can.
        _, layout = self._opened()
        position = self._first_position(per_epoch, layout)
        epochs = self.epochs
        while epochs is None or position.epoch < epochs:
            yield from self._rest_of_epoch(position)
            self._warn_of_rows_given_up(position, layout)
            position = self._at().normalized(layout)
            if self._fresh:
                self._position, self._step = position, 0  # a pass without a step is over all the same
            if per_epoch:
                return
        self.close()

    def _warn_of_rows_given_up(self, position: Position, layout: Layout) -> None:
        given_up = position.given_up(layout, self.epochs)
        if given_up and self.rank == 0:
            warnings.warn(
                f"The last {given_up} rows of the last epoch are left out: {layout.world_size} ranks cannot share "
                "them.",
                stacklevel=3,
            )

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Where Lightning looks for `set_epoch`: at ``loader.batch_sampler.sampler``."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with `epoch`, unless a position was loaded.

        Lightning's loops call this before each epoch. It brings the right order after a checkpoint that was saved at
        the end of an epoch, from which stock Lightning restores no loader. Without `per_epoch` it does nothing.
        """
        _, layout = self._opened()
        if epoch and self.shuffle and not self.per_epoch:
            warnings.warn(
                f"Epoch {epoch} begins, but each iteration of this feed has the order of epoch 0. Give it "
                "`per_epoch=True` for an order of its own in each epoch.",
                stacklevel=2,
            )
        loaded = self._loaded and self._fresh
        if self.per_epoch and not loaded and self._first_position(True, layout).epoch != epoch:
            self._position, self._step, self._loaded = Position.start_of(epoch, layout.order), 0, False

    def begin_epoch(self, epoch: int) -> None:
        """As `set_epoch`, from a loop that is sure to have left the epochs before: their rest is not wanted."""
        _, layout = self._opened()
        if self.per_epoch and self._first_position(True, layout).epoch < epoch:
            self._loaded = False
            self.set_epoch(epoch)

    def _first_position(self, per_epoch: bool, layout: Layout) -> Position:
        if self._fresh:
            return self._at()
        if self._position is None or not per_epoch:
            return Position.start_of(0, layout.order)
        position = self._at().normalized(layout)
        return position if position.step == 0 else Position.start_of(position.epoch + 1, layout.order)

    def _rest_of_epoch(self, position: Position) -> Iterator[Any]:
        supply = self._supply_from(position)
        self._position, self._step = position, position.step
        done = False
        try:
            for batch in self._for_device(supply.epoch()):
                self._step += 1
                yield batch
            done = True
        finally:
            if not done and self._supply is supply:
                self.close()

    def _for_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches as an accelerator takes them best; record batches, and those of a host alone, as they are."""
        if self._collate is None or not (self.copy_ahead or self.pin_memory is not False):
            return batches
        from ..plumbing.devices import accelerator
        from .to_device import copied_ahead, pinned

        if self.copy_ahead:
            return copied_ahead(batches)
        return map(pinned, batches) if self.pin_memory or accelerator() is not None else batches

    def _supply_from(self, position: Position) -> Supply:
        if self._supply is not None and self._supply.position == position:
            return self._supply
        self.close()
        self._supply = self._make_supply(self._spec(), position)
        return self._supply

    def _make_supply(self, spec: Spec, position: Position) -> Supply:
        own = getattr(spec.source, "supply", None)  # of rows that are no Arrow data
        if own is not None:
            supply: Supply = own(spec, position, self.workers)
            return supply
        if not self.workers:
            return ThreadSupply(spec, position)
        from .workers import arrow_supply

        return arrow_supply(spec, position, self.workers)

    def _spec(self) -> Spec:
        source, layout = self._opened()
        return Spec(
            source=source,
            layout=layout,
            rank=self.rank,
            epochs=self.epochs,
            readahead=self.readahead,
            collate=self._collate,
        )

    def close(self) -> None:
        """Stop reading and give files back; the position stays."""
        if self._supply is not None:
            self._supply.close()
            self._waited += self._supply.wait_seconds
            self._supply = None
        if self._source is not None:
            self._source.close()

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer has waited for data so far."""
        return self._waited + (self._supply.wait_seconds if self._supply is not None else 0.0)

    # --- position

    @property
    def _fresh(self) -> bool:
        """Whether the position was set and nothing was handed out since."""
        return self._position is not None and self._step == self._position.step

    def _at(self) -> Position:
        assert self._position is not None
        return replace(self._position, step=self._step)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out, as JSON values; the same on every rank."""
        source, layout = self._opened()
        position = self._at() if self._position is not None else Position.start_of(0, layout.order)
        return {**position.state(layout), "data": source.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the position of `state`, also on another number of ranks, batch size or sharding.

        Raises:
            InputError: The data, or its order, is not that of the state.
        """
        source, layout = self._opened()
        if state.get("data", source.fingerprint) != source.fingerprint:
            raise InputError(
                "The position belongs to other data: files, their sizes or row groups have changed. Resume "
                "with the data of the checkpoint, or start a new run."
            )
        self.close()
        self._position = Position.restored(state, layout)
        self._step, self._loaded = self._position.step, True
        if self._length is not None and self._steps_of_iteration() > self._length:
            warnings.warn(
                f"An epoch of the feed now has {self._steps_of_iteration()} steps, but its length was asked for before "
                f"the position was loaded and was {self._length}: Lightning would cut epochs short. Use an "
                "ArrowDataModule, whose position Lightning restores first.",
                stacklevel=2,
            )


def _refuse_data_loader_workers() -> None:
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise RuntimeError(
            "A feed inside a DataLoader worker would hand every row to every worker. Give the feed `workers` instead."
        )


def _too_few(layout: Layout) -> str:
    rows = layout.order.rows
    if layout.drop_last:
        return (
            f"The data has {rows} rows, fewer than the {layout.share(0).step_rows} of a full step (`drop_last` is on)."
        )
    return f"The data has {rows} rows for {layout.world_size} ranks; every rank needs at least one."


def _collate_function(chosen: Callable[[Any], Any] | str | None) -> Callable[[Any], Any] | None:
    """The function that turns a record batch into a batch, as the caller or a job names it.

    Raises:
        TypeError: It is neither a callable nor the name of one.
        ValueError: The name cannot be imported.
    """
    if chosen == "torch":
        from .collate import to_torch

        return to_torch
    return None if chosen is None else imported(chosen, "collate", "a callable, 'torch', 'module:function' or None")


def imported(
    function: Callable[..., Any] | str, setting: str, expected: str = "a callable or 'module:function'"
) -> Callable[..., Any]:
    """`function`, or the one behind ``module:function``, or ``module.function`` as configurations of Lightning have it.

    Args:
        function: The function, or its name.
        setting: What gives it, for messages.
        expected: What it may be, for messages.

    Raises:
        TypeError: It is neither a callable nor the name of one.
        ValueError: The name cannot be imported.
    """
    found: Any = function
    if isinstance(function, str) and not {".", ":"}.isdisjoint(function):
        try:
            found = pkgutil.resolve_name(function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"Invalid `{setting}`. {function!r} cannot be imported: {error}.") from None
        except Exception as error:  # a module may raise anything while it is imported
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"Invalid `{setting}`. {function!r} cannot be imported: {reason}.") from error
    if not callable(found):
        raise TypeError(f"Invalid `{setting}`. Expected {expected}, but received {function!r}.")
    called: Callable[..., Any] = found
    return called
