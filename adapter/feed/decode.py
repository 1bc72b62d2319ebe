"""Decoding: from row groups to chunks, large batches of rows in the order in which they are handed out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from ..contract.exceptions import InputError
from .epoch_order import Order, Piece
from .sources import Source

__all__ = ["Chunk", "decode", "join", "merged"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Decoded rows; the first is handed out as row `at` of block number `block`."""

    block: int
    at: int
    end: int
    batch: pa.RecordBatch


class HasBytes(Protocol):
    """A size in bytes that may change from one look to the next."""

    bytes: int


def merged(pieces: Iterable[Piece], source: Source, order: Order, size: HasBytes) -> Iterator[Piece]:
    """The same rows in fewer pieces: row groups that follow each other in a file are decoded together.

    Small row groups cost far more by themselves. Shuffled row groups do not follow each other.
    """
    last: Piece | None = None
    for piece in pieces:
        if last is not None and _continues(last, piece, order) and source.together(last.group, piece.group, size.bytes):
            last = replace(last, end=last.end + len(piece), last_group=piece.group)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _continues(last: Piece, piece: Piece, order: Order) -> bool:
    ends_with_its_group = last.end == sum(order.group_rows[last.group : last.last_group + 1])
    return (
        not order.shuffle
        and ends_with_its_group
        and piece.first == 0
        and piece.group == last.last_group + 1
        and piece.at == last.at + len(last)
    )


def decode(source: Source, order: Order, piece: Piece, max_bytes: int, block: int) -> Iterator[Chunk]:
    """The rows of `piece`, in the order of its epoch.

    Raises:
        InputError: A group cannot be decoded, or has another number of rows than its metadata says.
    """
    rows = source.read(piece.group, piece.last_group, max_bytes, piece.first)
    if order.shuffle:
        rows = _shuffled(rows, order, piece)
    offset = 0
    for batch in rows:
        low, high = max(piece.first - offset, 0), min(piece.end - offset, batch.num_rows)
        if low < high:
            at = piece.at + offset + low - piece.first
            whole = low == 0 and high == batch.num_rows
            rows_now = batch if whole else batch.slice(low, high - low)
            yield Chunk(block, at, at + high - low, rows_now)
        offset += batch.num_rows
        if offset >= piece.end:
            return
    raise InputError(f"{source.label(piece.last_group)}: the file changed while it was read; it lost rows")


def _shuffled(rows: Iterator[pa.RecordBatch], order: Order, piece: Piece) -> Iterator[pa.RecordBatch]:
    for index, batch in enumerate(_windows(rows, order.window)):
        if (index + 1) * order.window <= piece.first:
            yield batch  # before the first row that is wanted; only its length counts
            continue
        places = order.window_permutation(piece.epoch, piece.group, index, batch.num_rows)
        yield batch.take(pa.array(places))


def _windows(rows: Iterator[pa.RecordBatch], window: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of exactly `window`, the last one excepted."""
    pending: list[pa.RecordBatch] = []
    count = 0
    for batch in rows:
        while batch.num_rows:
            size = min(window - count, batch.num_rows)
            pending.append(batch.slice(0, size))
            batch, count = batch.slice(size), count + size
            if count == window:
                yield join(pending)
                pending, count = [], 0
    if pending:
        yield join(pending)


def join(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all rows, copied where there are several; also where dictionaries differ."""
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches)
    columns = [_one_array(column) for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    if isinstance(joined, pa.ChunkedArray):
        return joined.chunk(0) if joined.num_chunks == 1 else pa.concat_arrays(joined.chunks)
    return joined
