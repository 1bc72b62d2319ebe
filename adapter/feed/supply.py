"""From a position to batches: what is decoded for which steps, and the cutting of chunks into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from .plan import Share
from .position import Layout, Position
from .readahead import ReadAhead
from .reader import Chunk, decode, join, merged
from .sources import Part, Source

__all__ = ["Block", "Spec", "Supply", "ThreadSupply", "batches_of", "blocks", "chunks_of"]

_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Spec:
    """Everything that batches depend on; may be sent to another process."""

    source: Source
    layout: Layout
    rank: int
    epochs: int | None
    readahead: int
    readahead_bytes: int
    collate: Callable[[pa.RecordBatch], Any] | None
    track: bool
    """Tell which rows each batch consists of."""

    @property
    def chunk_bytes(self) -> int:
        """How large a chunk should be."""
        return min(_CHUNK_BYTES, self.readahead_bytes)


@dataclass(frozen=True)
class Block:
    """Steps ``first:end`` over the spans of `position`."""

    number: int
    position: Position
    first: int
    end: int


class Supply(Protocol):
    """Batches from a position on, epoch after epoch."""

    position: Position
    """Where the next epoch, or the rest of one, begins."""

    @property
    def parts(self) -> list[Part]:
        """Rows of the last batch, where they are tracked."""
        ...

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
        position = Position.start_of(position.epoch + 1, spec.layout.order)


def chunks_of(spec: Spec, block: Block) -> Iterator[Chunk]:
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
    for piece in merged(needed, spec.source, order, spec.chunk_bytes):
        yield from decode(spec.source, order, piece, spec.chunk_bytes, block.number)


class Cutter:
    """Cuts batches out of chunks; a batch within one chunk is a slice, without copies."""

    def __init__(self, chunks: Iterable[Chunk], rank: int, *, track: bool) -> None:
        self._chunks, self._rank, self._track = iter(chunks), rank, track
        self._chunk: Chunk | None = None
        self.parts: list[Part] = []

    def steps(self, share: Share, block: Block) -> Iterator[pa.RecordBatch]:
        """The batches of our rank in `block`, one for each step."""
        (start, end), stride, last = share.interval(block.first, self._rank), share.stride, share.steps - 1
        for step in range(block.first, block.end):
            if step == last:
                start, end = share.interval(step, self._rank)
            chunk = self._chunk
            if chunk is None or start >= chunk.end or chunk.block != block.number:
                chunk = self._advance(block, start)
            if end <= chunk.end:
                if self._track:
                    self.parts = [_part(chunk, start, end)]
                yield chunk.batch.slice(start - chunk.at, end - start)
            else:
                yield self._across(block, chunk, start, end)
            start, end = start + stride, end + stride

    def _across(self, block: Block, chunk: Chunk, start: int, end: int) -> pa.RecordBatch:
        batches, self.parts = [], []
        while True:
            stop = min(end, chunk.end)
            batches.append(chunk.batch.slice(start - chunk.at, stop - start))
            if self._track:
                self.parts.append(_part(chunk, start, stop))
            if stop == end:
                return join(batches)
            start, chunk = stop, self._advance(block, stop)

    def _advance(self, block: Block, start: int) -> Chunk:
        for chunk in self._chunks:
            if chunk.block == block.number and chunk.end > start:
                self._chunk = chunk
                return chunk
        raise RuntimeError("The feed was closed while one of its iterators was in use.")


def _part(chunk: Chunk, start: int, end: int) -> Part:
    return chunk.file, chunk.numbers[start - chunk.at : end - chunk.at]


def batches_of(spec: Spec, block: Block) -> Iterator[tuple[pa.RecordBatch, list[Part]]]:
    """The batches of one block, decoded here and now."""
    cutter = Cutter(chunks_of(spec, block), spec.rank, track=spec.track)
    for batch in cutter.steps(spec.layout.share(block.position.rows), block):
        yield batch, cutter.parts


class ThreadSupply:
    """Batches decoded by a thread of this process, which reads on into the next epoch."""

    def __init__(self, spec: Spec, position: Position) -> None:
        self.position = position
        self._collate = spec.collate
        self._layout = spec.layout
        self._blocks = blocks(spec, position)
        self._reader = ReadAhead(
            lambda: (chunk for block in blocks(spec, position) for chunk in chunks_of(spec, block)),
            spec.readahead,
            spec.readahead_bytes,
        )
        self._cutter = Cutter(self._reader, spec.rank, track=spec.track)

    @property
    def parts(self) -> list[Part]:
        """See `Supply`."""
        return self._cutter.parts

    @property
    def wait_seconds(self) -> float:
        """See `Supply`."""
        return self._reader.wait_seconds

    def epoch(self) -> Iterator[Any]:
        """See `Supply`."""
        position, share = self.position, self._layout.share(self.position.rows)
        if position.step < share.steps:
            batches = self._cutter.steps(share, next(self._blocks))
            yield from batches if self._collate is None else map(self._collate, batches)
        self.position = Position.start_of(position.epoch + 1, self._layout.order)

    def close(self) -> None:
        """See `Supply`."""
        self._reader.close()
