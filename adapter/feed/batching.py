"""From a position to batches: chunks that a thread decodes ahead of training, cut into the batches of each step."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from ..plumbing.threads import started
from .decode import Chunk, decode, join, merged
from .position import Layout, Position
from .row_plan import Share
from .sources import Source

__all__ = ["Block", "CLOSED", "ReadAhead", "Spec", "Supply", "ThreadSupply", "batches_of", "blocks"]

CHUNK_BYTES = 32 << 20
FIRST_CHUNK_BYTES = 1 << 18
LEAST_COST = CHUNK_BYTES // 64
"""The least size that a chunk counts for, in bytes: each is an object, and handing it over takes time."""
READAHEAD_BYTES = 256 << 20
"""Decoded bytes kept ready at most, beyond the chunk that is in use and the one being decoded."""
CLOSED = "The feed was closed or iterated again while one of its iterators was in use."


class ReadAhead:
    """An iterator over the chunks of `make()`, decoded by a background thread.

    It hands over large chunks, so that the cost of a hand-over is paid once per thousands of rows. An error travels in
    the same queue and is raised when the consumer comes to the place where the data should have been.

    Chunks of at most `max_bytes` wait at a time, a small one counted as `LEAST_COST`. One that is larger by itself is
    handed over when nothing else waits. With ``max_bytes=0`` there is no thread.

    Args:
        make: Makes the iterator that decodes; called in the thread. It must not refer to the consumer.
        max_bytes: Bytes kept ready.
    """

    def __init__(self, make: Callable[[], Iterator[Chunk]], max_bytes: int) -> None:
        self.wait_seconds = 0.0
        self._direct = make() if max_bytes == 0 else None
        self._ready: deque[Chunk] = deque()
        if self._direct is None:
            self._queue = _Queue(max_bytes)
            filling = threading.Thread(target=_fill, args=(self._queue, make), name="genlight-feed", daemon=True)
            thread = started(filling)
            # Also at interpreter exit: a thread that decodes while Arrow is torn down would crash the process.
            self._stop = weakref.finalize(self, _stop, self._queue, thread)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Chunk:
        if self._ready:
            return self._take()
        start = time.perf_counter()
        try:
            if self._direct is not None:
                return next(self._direct)
            self._ready = self._queue.take_all()
        finally:
            self.wait_seconds += time.perf_counter() - start
        return self._take()

    def _take(self) -> Chunk:
        chunk = self._ready.popleft()
        self._queue.release(chunk)
        return chunk

    def close(self) -> None:
        """Stop decoding and wait for the thread to end; more than one call is fine."""
        self._ready.clear()
        if self._direct is None:
            self._stop()
        else:
            self._direct = iter(())


class _Queue:
    """Hands chunks from one thread to another, in order, within limits.

    The consumer takes all that is there at once and releases chunks one by one as it uses them: with small chunks the
    two threads would otherwise wait for each other, and for the interpreter lock, at every single one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: deque[Chunk] = deque()
        self._end: BaseException | None = None
        self._bytes = 0
        self._changed = threading.Condition()
        self._stopped = False

    def put(self, chunk: Chunk) -> bool:
        """Wait for room, then append; False when the consumer has gone."""
        cost = _cost(chunk)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._bytes or self._bytes + cost <= self._max_bytes)
            if self._stopped:
                return False
            self._chunks.append(chunk)
            self._bytes += cost
            self._changed.notify_all()
            return True

    def end(self, reason: BaseException) -> None:
        """No more chunks; the consumer gets `reason` raised after the last one."""
        with self._changed:
            self._end = reason
            self._changed.notify_all()

    def take_all(self) -> deque[Chunk]:
        """Everything that is ready, at least one chunk; at the end its reason is raised, each time."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._stopped or self._end is not None)
            if not self._chunks:
                raise self._end if self._end is not None and not self._stopped else StopIteration
            taken, self._chunks = self._chunks, deque()
            return taken

    def release(self, chunk: Chunk) -> None:
        """`chunk` is in use and no longer counts as waiting."""
        cost = _cost(chunk)
        with self._changed:
            self._bytes -= cost
            # Waking the decoder for each of many small chunks would be the ping-pong that this avoids.
            if cost > LEAST_COST or self._bytes <= self._max_bytes / 2:
                self._changed.notify_all()

    def stop(self) -> None:
        """End both sides."""
        with self._changed:
            self._stopped = True
            self._chunks.clear()
            self._changed.notify_all()


def _cost(chunk: Chunk) -> int:
    return max(int(chunk.batch.nbytes), LEAST_COST)


def _fill(queue: _Queue, make: Callable[[], Iterator[Chunk]]) -> None:
    reason: BaseException = StopIteration()
    try:
        for chunk in make():
            if not queue.put(chunk):
                return
    except BaseException as error:  # noqa: BLE001 - raised in the training thread
        reason = error
    queue.end(reason)


def _stop(queue: _Queue, thread: threading.Thread) -> None:
    queue.stop()
    # Garbage may be collected in any thread, in the decoding one too.
    if thread is not threading.current_thread():
        thread.join()


@dataclass(frozen=True)
class Spec:
    """Everything that batches depend on; may be sent to another process."""

    source: Source
    layout: Layout
    rank: int
    epochs: int | None
    readahead: int
    collate: Callable[[pa.RecordBatch], Any] | None


@dataclass(frozen=True)
class Block:
    """Steps ``first:end`` over the spans of `position`."""

    number: int
    position: Position
    first: int
    end: int


class Supply(Protocol):
    """Batches from a position on, epoch after epoch."""

    position: Position | None
    """Where the next epoch, or the rest of one, begins; None while one is handed out."""

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer has waited."""
        ...

    def epoch(self) -> Iterator[Any]:
        """The batches up to the end of the epoch."""
        ...

    def close(self) -> None:
        """End threads and processes."""


def blocks(spec: Spec, position: Position, steps: int | None = None) -> Iterator[Block]:
    """All blocks from `position` to the end of the last epoch, of at most `steps` steps; None makes each an epoch."""
    number = 0
    while spec.epochs is None or position.epoch < spec.epochs:
        end = spec.layout.share(position.rows).steps
        for first in range(position.step, end, steps or max(end, 1)):
            yield Block(number, position, first, min(first + (steps or end), end))
            number += 1
        position = position.following(spec.layout)


class ChunkSize:
    """How large the next chunk should be: small at first, because training waits for it, then growing."""

    def __init__(self, largest: int, first: int | None = None) -> None:
        self.largest = largest
        self.bytes = min(largest, first or largest)

    def grow(self) -> None:
        """A chunk was decoded; the next one may take longer."""
        self.bytes = min(self.largest, self.bytes * 4)


def chunks_of(spec: Spec, block: Block, size: ChunkSize) -> Iterator[Chunk]:
    """The decoded rows that our rank needs for `block`; nothing else is read, up to whole row groups."""
    share, order = spec.layout.share(block.position.rows), spec.layout.order
    start, end = share.interval(block.first, spec.rank)[0], share.interval(block.end - 1, spec.rank)[1]
    needed = (
        piece.within(start, end)
        for piece in order.pieces(block.position.spans)
        if piece.at < end
        and start < piece.at + len(piece)
        and share.needs(spec.rank, max(piece.at, start), min(piece.at + len(piece), end))
    )
    for piece in merged(needed, spec.source, order, size):
        for chunk in decode(spec.source, order, piece, size.bytes, block.number):
            yield chunk
            size.grow()


class Cutter:
    """Cuts batches out of chunks; a batch within one chunk is a slice, without copies."""

    def __init__(self, chunks: Iterable[Chunk], rank: int) -> None:
        self._chunks, self._rank = iter(chunks), rank
        self._chunk: Chunk | None = None

    def steps(self, share: Share, block: Block) -> Iterator[pa.RecordBatch]:
        """The batches of our rank in `block`, one for each step."""
        step, stride = block.first, share.stride
        while step < block.end:
            start, end = share.interval(step, self._rank)
            chunk = self._chunk
            if chunk is None or start >= chunk.end or chunk.block != block.number:
                chunk = self._advance(block, start)
            if end > chunk.end:
                yield self._across(block, chunk, start, end)
                step += 1
                continue
            # All further steps of the same size that lie within the chunk.
            last = min(block.end, max(share.full_steps, step + 1))
            count = min(last - step, (chunk.end - end) // stride + 1)
            piece, size = chunk.batch.slice, end - start
            for first in range(start - chunk.at, start - chunk.at + count * stride, stride):
                yield piece(first, size)
                if self._chunk is not chunk:
                    raise RuntimeError(CLOSED)
            step += count

    def close(self) -> None:
        """Hand out nothing more: an iterator that is still in use fails at its next step."""
        self._chunk, self._chunks = None, iter(())

    def _across(self, block: Block, chunk: Chunk, start: int, end: int) -> pa.RecordBatch:
        batches = []
        while True:
            stop = min(end, chunk.end)
            batches.append(chunk.batch.slice(start - chunk.at, stop - start))
            if stop == end:
                return join(batches)
            start, chunk = stop, self._advance(block, stop)

    def _advance(self, block: Block, start: int) -> Chunk:
        for chunk in self._chunks:
            if chunk.block == block.number and chunk.end > start:
                self._chunk = chunk
                return chunk
        raise RuntimeError(CLOSED)


def batches_of(spec: Spec, block: Block) -> Iterator[pa.RecordBatch]:
    """The batches of one block, decoded here and now."""
    cutter = Cutter(chunks_of(spec, block, ChunkSize(CHUNK_BYTES)), spec.rank)
    return cutter.steps(spec.layout.share(block.position.rows), block)


class ThreadSupply:
    """Batches decoded by a thread of this process, which reads on into the next epoch."""

    def __init__(self, spec: Spec, position: Position) -> None:
        self.position: Position | None = position
        self._collate = spec.collate
        self._layout = spec.layout
        self._blocks = blocks(spec, position)
        size = ChunkSize(CHUNK_BYTES, FIRST_CHUNK_BYTES)
        self._reader = ReadAhead(
            lambda: (chunk for block in blocks(spec, position) for chunk in chunks_of(spec, block, size)),
            min(spec.readahead * CHUNK_BYTES, READAHEAD_BYTES),
        )
        self._cutter = Cutter(self._reader, spec.rank)

    @property
    def wait_seconds(self) -> float:
        """See `Supply`."""
        return self._reader.wait_seconds

    def epoch(self) -> Iterator[Any]:
        """See `Supply`."""
        assert self.position is not None
        position, share, self.position = self.position, self._layout.share(self.position.rows), None
        if position.step < share.steps:
            batches = self._cutter.steps(share, next(self._blocks))
            yield from batches if self._collate is None else map(self._collate, batches)
        self.position = position.following(self._layout)

    def close(self) -> None:
        """See `Supply`."""
        self._cutter.close()
        self._reader.close()
