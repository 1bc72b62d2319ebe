"""The feed: record batches for one rank, in a reproducible order, with a position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from ..exceptions import InputError
from .order import Order
from .parquet import ParquetSource
from .plan import SHARD_MODES, Shard, Share
from .position import Layout, Position
from .reader import Chunk, ReadAhead, decode, join
from .sources import Numbers, Source

__all__ = ["ArrowFeed"]

Collate: TypeAlias = Callable[[pa.RecordBatch], Any]

_CHUNK_BYTES = 32 << 20


class ArrowFeed:
    """An iterable of `pyarrow.RecordBatch`, this rank's share of each step.

    ``for batch in feed`` starts at the first row, or at the position that was loaded. With ``per_epoch`` one iteration
    is one epoch and the next iteration the next epoch, which is what Lightning's own loops expect of a loader; without
    it one iteration runs through all epochs.

    The position (`state_dict`) is that of the last batch handed out, whatever was decoded ahead. It is the same on all
    ranks and may be loaded on another number of ranks or with another batch size.

    Args:
        source: Parquet paths, folders, patterns or URLs, or a `Source`.
        batch_size: Rows a step and rank. The last step of an epoch may have fewer; see `plan`.
        readahead: Decoded chunks kept ready by a background thread; 0 decodes in the training thread.
        columns: Columns to read, in this order; None means all.
        filters: `[[column, operator, value], …]` (all must hold), a list of such lists (any must), or an Arrow
            expression.
        shuffle: Row groups in random order and rows permuted within windows, anew in each epoch.
        seed: The order depends on this and the number of the epoch alone.
        epochs: Passes over the data; None repeats without end.
        drop_last: Leave out the rows of an epoch that do not fill a step of all ranks.
        shard: ``rows`` or ``row_groups``; see `Share`.
        rank: Which share is ours.
        world_size: Number of shares.
        per_epoch: One iteration is one epoch.
        shuffle_window: Rows that are permuted among each other, and held decoded for it.
        readahead_bytes: Decoded bytes kept ready, beyond the chunk that is in use and the one being decoded.
        filesystem: A pyarrow or fsspec file system that all paths belong to; None finds it from each path.
        collate: Called with each record batch, in the training thread; its result is handed out instead. ``torch`` is
            `to_torch`.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int = 32,
        readahead: int = 2,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = None,
        drop_last: bool = False,
        shard: Shard = "rows",
        rank: int = 0,
        world_size: int = 1,
        per_epoch: bool = False,
        shuffle_window: int = 65_536,
        readahead_bytes: int = 256 << 20,
        filesystem: Any = None,
        collate: Collate | Literal["torch"] | None = None,
    ) -> None:
        _validate_at_least("batch_size", batch_size, 1)
        _validate_at_least("readahead", readahead, 0)
        _validate_at_least("seed", seed, 0)
        _validate_at_least("world_size", world_size, 1)
        _validate_at_least("shuffle_window", shuffle_window, 1)
        _validate_at_least("readahead_bytes", readahead_bytes, 1)
        if epochs is not None:
            _validate_at_least("epochs", epochs, 1)
        if not 0 <= rank < world_size:
            raise ValueError(f"Invalid `rank`. Expected 0 <= rank < {world_size}, but received {rank}.")
        if shard not in SHARD_MODES:
            raise ValueError(f"Invalid `shard`. Expected one of {SHARD_MODES}, but received {shard!r}.")
        self._given = source
        self._columns, self._filters, self._filesystem = columns, filters, filesystem
        self._batch_size, self._readahead, self._readahead_bytes = batch_size, readahead, readahead_bytes
        self._shuffle, self._seed, self._window = shuffle, seed, shuffle_window
        self._epochs, self._drop_last, self._shard = epochs, drop_last, shard
        self._rank, self._world_size, self._per_epoch = rank, world_size, per_epoch
        self._collate = _collate(collate)
        self._source: Source | None = None
        self._layout: Layout | None = None
        self._position: Position | None = None
        self._step = 0
        self._fresh = True
        self._reader: ReadAhead | None = None
        self._waited = 0.0

    # --- what the data is

    def check(self) -> None:
        """Read the metadata, once.

        Raises:
            InputError: Lists every fault that metadata can tell, and that there are rows for every rank.
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
        if self._per_epoch:
            return self.steps_per_epoch
        if self._epochs is None:
            raise TypeError("The feed repeats without end and has no length; give it `epochs`.")
        return self.steps_per_epoch * self._epochs

    def _opened(self) -> tuple[Source, Layout]:
        if self._source is None or self._layout is None:
            source = self._given if hasattr(self._given, "group_rows") else self._parquet()
            order = Order(source.group_rows, self._seed, self._shuffle, self._window)
            layout = Layout(order, self._batch_size, self._world_size, self._shard, self._drop_last)
            if not layout.steps_per_epoch:
                raise InputError(_too_few(layout))
            self._source, self._layout = source, layout
        return self._source, self._layout

    def _parquet(self) -> Source:
        return ParquetSource(self._given, columns=self._columns, filters=self._filters, filesystem=self._filesystem)

    # --- iteration

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._per_epoch)

    def iter_batches(self) -> Iterator[Any]:
        """All batches of all epochs from the position on, whatever `per_epoch` says."""
        return self._iterate(per_epoch=False)

    def _iterate(self, per_epoch: bool) -> Iterator[Any]:
        # Nothing is read before the first batch is asked for: Lightning calls iter() to see whether it can.
        _, layout = self._opened()
        position = self._first_position(per_epoch, layout)
        while self._epochs is None or position.epoch < self._epochs:
            yield from self._steps(position)
            position = self._at().normalized(layout)
            if per_epoch:
                break
        self._fresh = False

    def _first_position(self, per_epoch: bool, layout: Layout) -> Position:
        if self._position is None:
            return Position.start_of(0, layout.order)
        if self._fresh:
            return self._at()
        if per_epoch:
            position = self._at().normalized(layout)
            return position if position.step == 0 else Position.start_of(position.epoch + 1, layout.order)
        return Position.start_of(0, layout.order)

    def _steps(self, position: Position) -> Iterator[Any]:
        source, layout = self._opened()
        share = layout.share(position.rows)
        self._position, self._step = position, position.step
        reader = self._start_reader(source, layout, position, share)
        cursor, collate = _Cursor(reader), self._collate
        try:
            for step in range(position.step, share.steps):
                batch, _ = cursor.rows(*share.interval(step, self._rank))
                self._step = step + 1
                self._fresh = False
                yield batch if collate is None else collate(batch)
        finally:
            self._stop_reader(reader)

    def _start_reader(self, source: Source, layout: Layout, position: Position, share: Share) -> ReadAhead:
        self.close()
        rank, order, chunk_bytes = self._rank, layout.order, min(_CHUNK_BYTES, self._readahead_bytes)
        first = share.interval(position.step, rank)[0] if position.step < share.steps else share.total

        def chunks() -> Iterator[Chunk]:
            for piece in order.pieces(position.spans):
                end = piece.at + len(piece)
                if end > first and share.needs(rank, max(piece.at, first), end):
                    yield from decode(source, order, piece.after(first), chunk_bytes)

        self._reader = ReadAhead(chunks, self._readahead, self._readahead_bytes)
        return self._reader

    def _stop_reader(self, reader: ReadAhead) -> None:
        reader.close()
        if self._reader is reader:
            self._waited += reader.wait_seconds
            self._reader = None

    def close(self) -> None:
        """Stop reading and give files back. The position stays; iterating again goes on as before."""
        if self._reader is not None:
            self._stop_reader(self._reader)
        if self._source is not None:
            self._source.close()

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer has waited for data so far."""
        return self._waited + (self._reader.wait_seconds if self._reader is not None else 0.0)

    # --- position

    def _at(self) -> Position:
        assert self._position is not None
        return Position(self._position.epoch, self._position.spans, self._step)

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
        if state.get("data") != source.fingerprint:
            raise InputError(
                "The position belongs to other data: files, their sizes, row groups or filters have changed. Resume "
                "with the data of the checkpoint, or start a new run."
            )
        self.close()
        self._position = Position.restored(state, layout, self._epochs)
        self._step = self._position.step
        self._fresh = True


class _Cursor:
    """Cuts batches out of chunks; a batch within one chunk is a slice, without copies."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = iter(chunks)
        self._chunk: Chunk | None = None

    def rows(self, start: int, end: int) -> tuple[pa.RecordBatch, list[tuple[Chunk, Numbers]]]:
        chunk = self._chunk
        if chunk is None or start >= chunk.end:
            chunk = self._advance(start)
        if end <= chunk.end:
            return chunk.batch.slice(start - chunk.at, end - start), [(chunk, chunk.numbers)]
        parts = []
        while True:
            last = min(end, chunk.end)
            parts.append(chunk.batch.slice(start - chunk.at, last - start))
            start = last
            if start == end:
                return join(parts), []
            chunk = self._advance(start)

    def _advance(self, start: int) -> Chunk:
        for chunk in self._chunks:
            if chunk.end > start:
                self._chunk = chunk
                return chunk
        raise AssertionError(f"the reader ended before row {start}")


def _too_few(layout: Layout) -> str:
    rows = layout.order.rows
    if layout.drop_last:
        return (
            f"The data has {rows} rows, fewer than the {layout.share(0).step_rows} of a full step (`drop_last` is on)."
        )
    return f"The data has {rows} rows for {layout.world_size} ranks; every rank needs at least one."


def _validate_at_least(name: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Invalid `{name}`. Expected an integer >= {minimum}, but received {value!r}.")
    if value < minimum:
        raise ValueError(f"Invalid `{name}`. Expected an integer >= {minimum}, but received {value}.")


def _collate(chosen: Collate | Literal["torch"] | None) -> Collate | None:
    if chosen == "torch":
        from .collate import to_torch

        return to_torch
    if chosen is not None and not callable(chosen):
        raise TypeError(f"Invalid `collate`. Expected a callable, 'torch' or None, but received {chosen!r}.")
    return chosen
