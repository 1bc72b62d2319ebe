"""The feed: record batches for one rank, in a reproducible order, with a position."""

from __future__ import annotations

import logging
import pkgutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from ..contract.exceptions import InputError
from ..contract.types import ArrowFeedConfig
from ..plumbing.settings import faults_of
from .batching import ReadAhead, Spec, decode, rebatch
from .options import FeedOptions
from .position import Layout, Order, Position
from .row_plan import Share

if TYPE_CHECKING:
    import pyarrow as pa

    from .sources import Source

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True, eq=False, repr=False)
class ArrowFeed(FeedOptions):
    """An iterable of `pyarrow.RecordBatch`, this rank's share of each step.

    ``for batch in feed`` yields one epoch, as loops expect of a loader. The first loop yields the first epoch or, after
    `load_state_dict`, the rest of the loaded epoch; each further loop yields the next epoch. ``feed.iter_batches()``
    yields all epochs.

    The position (`state_dict`) is the place after the last batch handed out, no matter what was decoded ahead. It is
    the same on all ranks and can be loaded on another number of ranks or with another batch size.

    The fields of `FeedOptions` are arguments as well. `collate` may also be a function. Without `workers` it is called
    in the training thread, with each record batch.

    Args:
        source: Paths, folders, patterns or URLs of Parquet files; tables or record batches; a data frame (pandas,
            polars, …; read into memory).
        rank: Index of this rank's share.
        world_size: Number of shares.
        filesystem: A pyarrow or fsspec file system that all paths belong to; None finds it from each path.

    Raises:
        ValueError: Arguments cannot be used, or `collate` cannot be imported.
        TypeError: `collate` is not a function.
    """

    source: Any = field(kw_only=False)
    rank: int = 0
    world_size: int = 1
    filesystem: Any = None

    def __post_init__(self) -> None:
        faults = faults_of(self, FeedOptions)
        if type(self.world_size) is not int or type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            given = f"{self.rank!r} of {self.world_size!r}"
            faults.append(f"Invalid `rank`. Expected 0 <= rank < `world_size`, but received {given}.")
        if faults:
            raise ValueError(" ".join(faults))
        self.columns = None if self.columns is None else tuple(self.columns)
        self._collate = _collate_function(self.collate)
        self._position: Position | None = None
        """Start of the running pass; between passes, of the latest one, or of the next one if that was loaded or set.

        None before the first pass.
        """
        self._step = 0
        """Steps of the pass, up to the last batch handed out."""
        self._loaded = False
        """Whether the position comes from `load_state_dict`."""
        self._length: int | None = None
        self._opened = ExitStack()
        """Threads and processes of the pass."""
        self.wait_seconds = 0.0
        """Seconds that the consumer has waited for batches so far."""

    # --- the data

    def check(self) -> None:
        """Read the metadata, once.

        Raises:
            InputError: Lists every error that the metadata shows, such as too few rows for the ranks.
        """
        _ = self._layout

    @property
    def schema(self) -> pa.Schema:
        """Schema of every batch."""
        return self._source.schema

    @property
    def rows(self) -> int:
        """Rows of an epoch over all ranks."""
        return self._layout.order.rows

    def __len__(self) -> int:
        """Return the steps of an epoch, or more if the number of ranks or the batch size changed in the middle of it.

        Lightning ends an epoch after this many steps, including those before a resume. It asks once for all epochs, so
        too small a number would cut epochs short; too large a number does no harm.
        """
        layout = self._layout
        here = self._position or Position.start_of(0, layout.order)
        steps = [layout.share(pass_.rows).steps for pass_ in (here, here.following(layout))]
        self._length = max(layout.epoch.steps, here.before + steps[0], steps[1])
        return self._length

    @cached_property
    def _source(self) -> Source:
        if hasattr(self.source, "group_rows"):
            source: Source = self.source
            return source
        from .sources import open_source  # loads pyarrow, which rows of other kinds do not need

        return open_source(self.source, columns=self.columns, filesystem=self.filesystem)

    @cached_property
    def _layout(self) -> Layout:
        """The order of the rows and their division among steps and ranks.

        Raises:
            InputError: There are too few rows for a step.
        """
        order = Order(self._source.group_rows, self.seed, self.shuffle, self.shuffle_window)
        share = Share(order.rows, self.batch_size, self.world_size, self.shard, self.drop_last)
        if not share.steps:
            needed = f"the {share.step_rows} of a full step (`drop_last` is on)" if self.drop_last else "one per rank"
            raise InputError(f"The data has {order.rows} rows for {self.world_size} ranks, fewer than {needed}.")
        rest = share.total - share.full_steps * share.step_rows
        if rest and self.rank == 0 and not self.drop_last:
            # The batch size of some steps differs from the requested one.
            log.log(
                logging.INFO if share.full_steps else logging.WARNING,
                f"an epoch of {share.total} rows has {share.full_steps} steps of {share.step_rows} rows; the last "
                f"{rest} rows make smaller steps, or come first in the next epoch if there are too few for the ranks "
                "(`drop_last` drops them)",
            )
        return Layout(order, share)

    # --- iteration

    def __iter__(self) -> Iterator[Any]:
        return self._pass()

    def iter_batches(self) -> Iterator[Any]:
        """Yield the batches of all epochs, from the first row or from the loaded position."""
        position = self._current_position() if self._is_fresh else Position.start_of(0, self._layout.order)
        while self.epochs is None or position.epoch < self.epochs:
            yield from self._pass(position)
            left = sum(end - first for _, first, end in position.left_over(self._layout))
            position = self._current_position().normalized(self._layout)
            if left and position.epoch == self.epochs and self.rank == 0:
                warnings.warn(
                    f"The last {left} rows of the last epoch are not used: {self.world_size} ranks cannot share them.",
                    stacklevel=2,
                )

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """An object through which Lightning finds `set_epoch`, as ``loader.batch_sampler.sampler``."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with `epoch`, unless a position was loaded.

        Lightning's loops call this before each epoch. After a resume between two epochs, the right order depends on
        this call, because stock Lightning restores loaders only within an epoch.
        """
        if not (self._loaded and self._is_fresh) and self._upcoming().epoch != epoch:
            self._position, self._step, self._loaded = Position.start_of(epoch, self._layout.order), 0, False

    def begin_epoch(self, epoch: int) -> None:
        """Like `set_epoch`, but if the loaded position is in an earlier epoch, skip the rest of that epoch."""
        if self._upcoming().epoch < epoch:
            self._loaded = False
            self.set_epoch(epoch)

    def _upcoming(self) -> Position:
        """Return the start of the next iteration."""
        if self._position is None:
            return Position.start_of(0, self._layout.order)
        if self._is_fresh:
            return self._current_position()
        position = self._current_position().normalized(self._layout)
        return position if position.step == 0 else Position.start_of(position.epoch + 1, self._layout.order)

    def _pass(self, position: Position | None = None) -> Iterator[Any]:
        """Yield the batches from `position`, or from the start of the next iteration, to the end of the epoch."""
        # Read nothing before the first batch is requested: Lightning calls iter() to check that it works.
        _refuse_data_loader_workers()
        position = position or self._upcoming()
        self.close()
        opened = self._opened
        batches = self._pin(self._batches(position))
        self._position, self._step = position, position.step
        try:
            for batch in batches:
                self._step += 1
                yield batch
                if self._opened is not opened:
                    raise RuntimeError("The feed was closed or iterated again while one of its iterators was in use.")
            if self._is_fresh:  # a pass without steps: the next iteration must not begin the same pass again
                self._position, self._step = position.normalized(self._layout), 0
        finally:
            if self._opened is opened:
                self.close()

    def _batches(self, position: Position) -> Iterator[Any]:
        """Return the batches of this rank from `position` to the end of the pass."""
        share = self._layout.share(position.rows)
        steps = range(position.step, share.steps)
        if not steps:
            return iter(())
        source, opened = self._source, self._opened
        spec = Spec(source, self._layout, self.rank, self._collate)
        batches_of_source = getattr(source, "batches", None)  # only a source of rows that are not Arrow data has this
        if batches_of_source is not None:
            return self._time_waits(batches_of_source(spec, position, self.workers, opened=opened))
        if self.workers:
            from .workers import arrow_batches

            return self._time_waits(arrow_batches(spec, position, self.workers, ahead=self.readahead, opened=opened))
        rows = decode(spec, position, steps)
        opened.callback(source.close)
        if self.readahead:
            rows = reader = ReadAhead(rows, self.readahead)
            opened.callback(reader.close)
        batches = rebatch(self._time_waits(rows), share.intervals(steps.start, steps.stop, self.rank))
        return batches if self._collate is None else map(self._collate, batches)

    def _time_waits(self, items: Iterator[T]) -> Iterator[T]:
        """Yield `items`, and add the seconds that each of them takes to `wait_seconds`."""
        while True:
            began_s = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.wait_seconds += time.perf_counter() - began_s
            yield item

    def _pin(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return `batches` in pinned memory if `pin_memory` is set or, by default, if there is an accelerator.

        Record batches are never pinned.
        """
        if self._collate is None or self.pin_memory is False:
            return batches
        from ..plumbing.devices import accelerator, pinned

        return map(pinned, batches) if self.pin_memory or accelerator() is not None else batches

    def close(self) -> None:
        """End the threads and processes that read ahead; keep the position."""
        opened, self._opened = self._opened, ExitStack()
        opened.close()

    # --- position

    @property
    def _is_fresh(self) -> bool:
        """Whether the position was set and no batch was handed out since."""
        return self._position is not None and self._step == self._position.step

    def _current_position(self) -> Position:
        assert self._position is not None
        return replace(self._position, step=self._step)

    @property
    def _extent(self) -> list[int]:
        """Number of rows and number of row groups."""
        return [sum(self._source.group_rows), len(self._source.group_rows)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, as JSON values; the same on every rank."""
        position = Position.start_of(0, self._layout.order) if self._position is None else self._current_position()
        return {**position.state(self._layout), "data": self._source.fingerprint, "extent": self._extent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of `state`, also with another number of ranks, batch size or sharding.

        Raises:
            InputError: The state belongs to other data or to another order.
        """
        if state.get("data", self._source.fingerprint) != self._source.fingerprint:
            now, before = self._extent, state.get("extent", self._extent)
            changed = "files, their sizes or row groups have changed"
            if now != before:
                changed = f"it had {before[0]:,} rows in {before[1]:,} row groups, and now has {now[0]:,} in {now[1]:,}"
            raise InputError(
                f"The position belongs to other data: {changed}. Resume with the data of the checkpoint, or start a "
                "new run."
            )
        self.close()
        self._position = Position.restored(state, self._layout)
        self._step, self._loaded = self._position.step, True
        reported = self._length
        if reported is not None and len(self) > reported:
            warnings.warn(
                f"An epoch of the feed now has {len(self)} steps, but before the position was loaded its length was "
                f"{reported}: Lightning would cut epochs short. Use an ArrowDataModule, whose position Lightning "
                "restores first.",
                stacklevel=2,
            )


class ParquetArrowBatchFeeder(ArrowFeed):
    """One pass over Parquet files in order, as record batches; classes of the older runtime import it.

    Args:
        parquet_paths: One or many paths.
        config: Batch size, readahead and columns.
    """

    def __init__(self, parquet_paths: Any, config: ArrowFeedConfig | None = None) -> None:
        self.config = config or ArrowFeedConfig()
        options = {name: getattr(self.config, name) for name in ("batch_size", "readahead", "columns")}
        super().__init__(parquet_paths, epochs=1, **options)


def _refuse_data_loader_workers() -> None:
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        raise RuntimeError(
            "A feed inside a DataLoader worker would hand every row to every worker. Give the feed `workers` instead."
        )


def _collate_function(chosen: Callable[[Any], Any] | str | None) -> Callable[[Any], Any] | None:
    """Return the function that turns a record batch into a batch.

    Raises:
        TypeError: The value is neither a callable nor a name.
        ValueError: The name cannot be imported.
    """
    if chosen == "torch":
        from .collate import to_torch

        return to_torch
    return (
        None if chosen is None else import_function(chosen, "collate", "a callable, 'torch', 'module:function' or None")
    )


def import_function(
    function: Callable[..., Any] | str, setting: str, expected: str = "a callable or 'module:function'"
) -> Callable[..., Any]:
    """Return `function`, or import it by ``module:function``, or ``module.function`` as in Lightning's configurations.

    Args:
        function: The function, or its name.
        setting: Name of the setting, for messages.
        expected: Accepted values, for messages.

    Raises:
        TypeError: The value is neither a callable nor a name.
        ValueError: The name cannot be imported.
    """
    found: Any = function
    if isinstance(function, str) and not {".", ":"}.isdisjoint(function):
        try:
            found = pkgutil.resolve_name(function)
        except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
            reason = f"{type(error).__name__}: {error}"
            cause = None if isinstance(error, ImportError | AttributeError) else error
            raise ValueError(f"Invalid `{setting}`. {function!r} cannot be imported: {reason}.") from cause
    if not callable(found):
        raise TypeError(f"Invalid `{setting}`. Expected {expected}, but received {function!r}.")
    called: Callable[..., Any] = found
    return called
