"""From a position to batches: what is decoded for which steps, and the cutting of chunks into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from .decode import Chunk, decode, join, merged
from .position import Layout, Position
from .prefetch import ReadAhead
from .row_plan import Share
from .sources import Source

__all__ = ["CLOSED", "Block", "Spec", "Supply", "ThreadSupply", "batches_of", "blocks", "chunks_of"]

CHUNK_BYTES = 32 << 20
FIRST_CHUNK_BYTES = 1 << 18
READAHEAD_BYTES = 256 << 20
"""Decoded bytes kept ready, beyond the chunk that is in use and the one being decoded."""
CLOSED = "The feed was closed or iterated again while one of its iterators was in use."


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
            spec.readahead,
            READAHEAD_BYTES,
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
