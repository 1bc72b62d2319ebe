"""Decode row groups in chunks, ahead of training, and cut them into the batches of each step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ..contract.exceptions import ThreadLimitError
from .position import Layout, Order, Piece, Position
from .row_plan import cut

if TYPE_CHECKING:
    import pyarrow as pa

    from .sources import Source

CHUNK_BYTES = 32 << 20
FIRST_CHUNK_BYTES = 1 << 18
"""Size of the first chunk, for which training waits; later chunks are larger."""

Rows: TypeAlias = "tuple[int, pa.RecordBatch]"
"""Rows, preceded by the index of the first of them among the rows of the pass."""
T = TypeVar("T")


@dataclass(frozen=True)
class Spec:
    """Everything that determines the batches; can be sent to another process."""

    source: Source
    layout: Layout
    rank: int
    collate: Callable[[pa.RecordBatch], Any] | None


def decode(spec: Spec, position: Position, steps: range, chunk_bytes: int = FIRST_CHUNK_BYTES) -> Iterator[Rows]:
    """Yield the rows that this rank needs for `steps` of a pass; only the row groups that have them are read.

    Raises:
        InputError: Rows cannot be decoded, or a file has changed.
    """
    share, order = spec.layout.share(position.rows), spec.layout.order
    start, end = share.interval(steps[0], spec.rank)[0], share.interval(steps[-1], spec.rank)[1]
    source, at = spec.source, start

    def reach(group: int) -> int:
        return source.reach(group, chunk_bytes)

    for span in cut(position.spans, [(start, end)]):
        for piece in order.pieces(span, reach):
            if order.shuffle:
                read = _read_shuffled(source, order, piece, chunk_bytes)
            else:
                read = source.read(piece.group, piece.first, piece.end, chunk_bytes)
            yield from _number(read, at)
            at += piece.end - piece.first
            chunk_bytes = min(chunk_bytes * 4, CHUNK_BYTES)


def _read_shuffled(source: Source, order: Order, piece: Piece, chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `piece` in shuffled order, one batch per window of `order`."""
    import pyarrow as pa

    rows_of_group, window = order.group_rows[piece.group], order.window
    starts = range(piece.first // window * window, piece.end, window)
    windows = [(start, min(start + window, rows_of_group)) for start in starts]
    rows = _number(source.read(piece.group, starts[0], windows[-1][1], chunk_bytes), starts[0])
    for start, batch in zip(starts, rebatch(rows, windows), strict=True):
        places = order.window_permutation(piece.epoch, piece.group, start // window, batch.num_rows)
        yield batch.take(pa.array(places[max(piece.first - start, 0) : piece.end - start]))


def _number(batches: Iterable[pa.RecordBatch], at: int) -> Iterator[Rows]:
    """Yield each batch with the index of its first row; the first batch begins at `at`."""
    for batch in batches:
        yield at, batch
        at += batch.num_rows


def rebatch(chunks: Iterator[Rows], intervals: Iterable[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of each interval, in order; an interval within one chunk is not copied."""
    at = end = 0
    slice_chunk: Any = None
    for start, stop in intervals:
        if stop <= end:
            yield slice_chunk(start - at, stop - start)
            continue
        parts = []
        while stop > end:
            if start < end:
                parts.append(slice_chunk(start - at))
                start = end
            at, rows = next(chunks)
            end, slice_chunk = at + rows.num_rows, rows.slice
        parts.append(slice_chunk(start - at, stop - start))
        yield parts[0] if len(parts) == 1 else _join(parts)


def _join(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return one batch with a copy of all rows; the dictionaries of their columns may differ."""
    import pyarrow as pa

    columns = [pa.concat_arrays(parts) for parts in zip(*(batch.columns for batch in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


class ReadAhead(Generic[T]):
    """Items of an iterator; a thread reads up to `ahead` of them before the consumer needs them.

    If reading an item fails, the error is raised when the consumer requests that item.

    Raises:
        ThreadLimitError: The system cannot start another thread.
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._items = items
        self._pool = ThreadPoolExecutor(1, "genlight-feed")
        # If nobody calls `close`, the thread ends after its current item. The finalizer does not wait for the thread,
        # because it may itself run in that thread.
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        try:
            self._coming = deque(self._pool.submit(next, items, None) for _ in range(ahead))
        except RuntimeError as error:
            raise ThreadLimitError(
                f"No thread could be started that reads the data ({error}). Raise the limit on processes and threads "
                "(`ulimit -u`, or the container's limit on pids), or set `readahead` to 0."
            ) from error

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._coming.popleft().result()
        if item is None:
            raise StopIteration
        self._coming.append(self._pool.submit(next, self._items, None))
        return item

    def close(self) -> None:
        """Wait for the item in progress, and read no further ones."""
        self._pool.shutdown(cancel_futures=True)
