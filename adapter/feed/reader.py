"""Decoding ahead of the training thread, within a number of batches and of bytes.

The decoder runs in one background thread and hands over large batches, so that the cost of a hand-over is paid once
per thousands of rows. It waits when enough is ready. An error travels in the same queue and is raised when the
consumer comes to the place where the data should have been.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..exceptions import InputError
from .order import Order, Piece
from .sources import Decoded, Numbers, Source

__all__ = ["Chunk", "ReadAhead", "decode"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Decoded rows of one group; the first is handed out as row `at`."""

    at: int
    end: int
    batch: pa.RecordBatch
    numbers: Numbers
    piece: Piece


def decode(source: Source, order: Order, piece: Piece, max_bytes: int) -> Iterator[Chunk]:
    """The rows of `piece`, in the order of its epoch.

    Raises:
        InputError: The group cannot be decoded, or has another number of rows than its metadata told.
    """
    rows = source.read(piece.group, max_bytes)
    if order.shuffle:
        rows = _shuffled(rows, order, piece)
    offset = 0
    for batch, numbers in rows:
        low, high = max(piece.first - offset, 0), min(piece.end - offset, batch.num_rows)
        if low < high:
            at = piece.at + offset + low - piece.first
            yield Chunk(at, at + high - low, batch.slice(low, high - low), numbers[low:high], piece)
        offset += batch.num_rows
        if offset >= piece.end:
            return
    raise InputError(f"{source.label(piece.group)}: the file changed while it was read; it lost rows")


def _shuffled(rows: Iterator[Decoded], order: Order, piece: Piece) -> Iterator[Decoded]:
    for index, (batch, numbers) in enumerate(_windows(rows, order.window)):
        start = index * order.window
        if start + batch.num_rows <= piece.first:
            yield batch, numbers
            continue
        places = order.window_permutation(piece.epoch, piece.group, index, batch.num_rows)
        yield batch.take(pa.array(places)), np.asarray(numbers)[places]


def _windows(rows: Iterator[Decoded], window: int) -> Iterator[Decoded]:
    """The same rows in batches of exactly `window`, the last one excepted."""
    held: list[Decoded] = []
    count = 0
    for batch, numbers in rows:
        while batch.num_rows:
            size = min(window - count, batch.num_rows)
            held.append((batch.slice(0, size), numbers[:size]))
            batch, numbers, count = batch.slice(size), numbers[size:], count + size
            if count == window:
                yield _joined(held)
                held, count = [], 0
    if held:
        yield _joined(held)


def _joined(parts: list[Decoded]) -> Decoded:
    if len(parts) == 1:
        return parts[0]
    return join([batch for batch, _ in parts]), np.concatenate([np.asarray(numbers) for _, numbers in parts])


def join(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows, copied; also where dictionaries differ."""
    table = pa.Table.from_batches(batches).combine_chunks()
    columns = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


class ReadAhead:
    """An iterator over the chunks of `make()`, decoded by a background thread.

    At most `max_items` chunks wait at a time, and together at most `max_bytes`, one chunk excepted: a chunk that is
    larger by itself is decoded when nothing else waits. With ``max_items=0`` there is no thread.

    Args:
        make: Makes the iterator that decodes; called in the thread.
        max_items: Chunks kept ready.
        max_bytes: Bytes kept ready.
    """

    def __init__(self, make: Callable[[], Iterator[Chunk]], max_items: int, max_bytes: int) -> None:
        self.wait_seconds = 0.0
        self._direct = make() if max_items == 0 else None
        if self._direct is None:
            self._queue = _Queue(max_items, max_bytes)
            thread = threading.Thread(target=_fill, args=(self._queue, make), name="genlight-feed", daemon=True)
            thread.start()
            # Also at interpreter exit: a thread that decodes while Arrow is torn down would crash the process.
            self._stop = weakref.finalize(self, _stop, self._queue, thread)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Chunk:
        start = time.perf_counter()
        try:
            return next(self._direct) if self._direct is not None else self._queue.get()
        finally:
            self.wait_seconds += time.perf_counter() - start

    def close(self) -> None:
        """Stop decoding and wait for the thread to end; more than one call is fine."""
        if self._direct is None:
            self._stop()
        elif hasattr(self._direct, "close"):
            self._direct.close()


class _Queue:
    """Hands chunks from one thread to another, in order, within limits."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items, self._max_bytes = max_items, max_bytes
        self._items: deque[tuple[Chunk | BaseException, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self.stopped = False

    def put(self, item: Chunk | BaseException, size: int) -> bool:
        """Wait for room, then append; False when the consumer has gone."""
        with self._changed:
            while not self.stopped and self._full(size):
                self._changed.wait()
            if self.stopped:
                return False
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def _full(self, size: int) -> bool:
        return bool(self._items) and (len(self._items) >= self._max_items or self._bytes + size > self._max_bytes)

    def get(self) -> Chunk:
        """The next chunk; an exception that was put is raised, and again each time after."""
        with self._changed:
            while not self._items:
                if self.stopped:
                    raise StopIteration
                self._changed.wait()
            item, size = self._items[0]
            if isinstance(item, BaseException):
                raise item
            self._items.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        """End both sides."""
        with self._changed:
            self.stopped = True
            self._items.clear()
            self._changed.notify_all()


def _fill(queue: _Queue, make: Callable[[], Iterator[Chunk]]) -> None:
    end: BaseException = StopIteration()
    try:
        for chunk in make():
            if not queue.put(chunk, chunk.batch.nbytes):
                return
    except BaseException as error:  # noqa: BLE001 - raised in the training thread
        end = error
    queue.put(end, 0)


def _stop(queue: _Queue, thread: threading.Thread) -> None:
    queue.stop()
    thread.join()
