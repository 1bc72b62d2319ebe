"""The sources of a feed: row groups that can be decoded one by one, in any order.

A source knows the number of rows of each group without decoding it. So order, sharding and position are arithmetic, and
a resume decodes nothing before the row group of its position.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from ..contract.exceptions import InputError
from ..plumbing.text import closest, list_first, shortened
from .files import DataFile, expand

_MOST_ERRORS = 40
_JOINED_BITS = 32
"""Minimum bits of dictionary indices, so that they can number the values of several row groups together."""


class Source(Protocol):
    """Row groups with known row counts. Methods are called from one thread at a time."""

    schema: pa.Schema
    """Schema of every batch."""
    group_rows: tuple[int, ...]
    """Rows of each group."""
    fingerprint: str
    """Changes if the rows or their order may have changed; does not depend on the folder of the files."""

    def reach(self, group: int, max_bytes: int) -> int:
        """Return how many rows to read together from the start of a group, including rows of the following groups."""
        ...

    def read(self, group: int, first: int, end: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows ``first:end`` of a group, in batches of about `max_bytes` if possible."""
        ...

    def close(self) -> None:
        """Close open files; reading again opens them again."""


class TableSource:
    """Tables and record batches in memory; nothing is copied.

    Args:
        given: Tables and record batches; each chunk becomes a group.
        columns: Columns to hand out, in this order; None means all.

    Raises:
        InputError: A column is missing, schemas differ, or the tables hold no rows.
    """

    def __init__(self, given: Sequence[pa.Table | pa.RecordBatch], *, columns: Sequence[str] | None = None) -> None:
        self.schema, errors = _project([(f"table {i}", table.schema) for i, table in enumerate(given)], columns)
        if errors:
            raise _input_error(errors)
        tables = [table if isinstance(table, pa.Table) else pa.Table.from_batches([table]) for table in given]
        self._groups = [_conform(batch, self.schema) for table in tables for batch in table.to_batches()]
        self.group_rows: tuple[int, ...] = tuple(batch.num_rows for batch in self._groups)
        if not sum(self.group_rows):
            raise _input_error(["no rows in the tables"])
        self.fingerprint = xxhash.xxh3_64_hexdigest(str(self.group_rows).encode())

    def reach(self, group: int, max_bytes: int) -> int:
        """See `Source`."""
        return self.group_rows[group]

    def read(self, group: int, first: int, end: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """See `Source`; yields all rows at once, because a slice costs nothing."""
        yield self._groups[group].slice(first, end - first)

    def close(self) -> None:
        """See `Source`."""


def _input_error(errors: Sequence[str]) -> InputError:
    """Return one error that lists `errors`; if there are many, only the first ones and the number of the others."""
    if len(errors) == 1:
        return InputError(f"Cannot read the training data: {errors[0]}")
    shown = [*errors[:_MOST_ERRORS], *([f"and {len(errors) - _MOST_ERRORS} more"] if errors[_MOST_ERRORS:] else [])]
    return InputError("Cannot read the training data:" + "".join(f"\n- {error}" for error in shown))


def _project(named: Iterable[tuple[str, pa.Schema]], columns: Sequence[str] | None) -> tuple[pa.Schema, list[str]]:
    """Return the common schema of `columns` in all files, and every conflict; None means all columns of the first file.

    Files may differ in the order of columns, in nullability and metadata, and in types that `_common_type` unites.
    """
    schemas = [(name, _simplify(schema)) for name, schema in named]
    first_name, first = schemas[0]
    wanted = list(dict.fromkeys(first.names if columns is None else columns))
    errors = [error for name, schema in schemas for error in _missing_columns(name, schema, wanted)]
    if errors:
        return first, errors
    fields = []
    for column in wanted:
        kind, given_by = first.field(column).type, first_name
        for name, schema in schemas[1:]:
            other = schema.field(column).type
            common = _common_type(kind, other)
            if common is None:
                errors.append(
                    f"{name}: column {column!r} is {other}, but {kind} in {given_by}; write the files again with one "
                    "type for it, or leave it out by `columns`"
                )
                continue
            given_by = given_by if common.equals(kind) else name
            kind = common
        nullable = any(schema.field(column).nullable for _, schema in schemas)
        fields.append(first.field(column).with_type(kind).with_nullable(nullable))
    for name, schema in schemas[1:] if columns is None else ():
        extra = [column for column in schema.names if column not in wanted]
        if extra:
            errors.append(f"{name}: columns {_list_names(extra)} are not in {first_name}; name `columns` to skip them")
    return pa.schema(fields, metadata=first.metadata), errors


_WIDER = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def _common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both types without loss, or None.

    Types are only united if a writer chooses between them by the values of a file: null for a column without values,
    large offsets for much text, and dictionaries by the number of different values.
    """
    if one.equals(other) or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_dictionary(one) or pa.types.is_dictionary(other):
        dictionaries = [kind for kind in (one, other) if pa.types.is_dictionary(kind)]
        values = _common_type(*(kind.value_type if kind in dictionaries else kind for kind in (one, other)))
        if values is None or len(dictionaries) < 2 or one.ordered != other.ordered:
            return values
        return pa.dictionary(one.index_type if one.index_type == other.index_type else pa.int64(), values, one.ordered)
    if _WIDER.get(one) == other or _WIDER.get(other) == one:
        return _WIDER.get(one, one)
    lists = [kind for kind in (one, other) if pa.types.is_list(kind) or pa.types.is_large_list(kind)]
    if len(lists) == 2:
        item = _common_type(one.value_type, other.value_type)
        make = pa.large_list if any(map(pa.types.is_large_list, lists)) else pa.list_
        return None if item is None else make(one.value_field.with_type(item))
    if pa.types.is_struct(one) and pa.types.is_struct(other) and one.names == other.names:
        members = [_common_type(*pair) for pair in zip(_types_in(one), _types_in(other), strict=True)]
        return None if None in members else pa.struct(list(zip(one.names, members, strict=True)))
    return None


def _types_in(struct: pa.StructType) -> list[pa.DataType]:
    return [struct.field(index).type for index in range(struct.num_fields)]


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return `batch` with the columns and the order of `schema`; only columns whose type changes are copied."""
    if batch.schema.equals(schema):
        return batch
    columns = [_decode_column(batch.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _decode_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    return column if column.type.equals(kind) else column.cast(kind)


def _simplify(schema: pa.Schema) -> pa.Schema:
    """Return `schema` without encodings that Arrow cannot reorder, filter or join."""
    return pa.schema([field.with_type(_simplify_type(field.type)) for field in schema], metadata=schema.metadata)


def _simplify_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_run_end_encoded(kind):
        return kind.value_type
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_dictionary(kind) and kind.index_type.bit_width < _JOINED_BITS:
        return pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def _missing_columns(name: str, schema: pa.Schema, wanted: Sequence[str]) -> Iterator[str]:
    """Yield a message for each wanted column that a file lacks or has twice."""
    known = schema.names
    for column in wanted:
        count = known.count(column)
        if count == 0:
            near = closest(column, known, alike=0.5)
            hint = f"did you mean {near!r}?" if near else f"it has {_list_names(known)}"
            if f"{column}=" in name:
                hint = f"it is only part of the path, which is not read; write it into the files, or drop {column!r}"
            yield f"{name}: no column {column!r}; {hint}"
        elif count > 1:
            yield f"{name}: {count} columns are named {column!r}"


def _list_names(names: Sequence[str]) -> str:
    return list_first(list(map(repr, names))) if names else "no columns"


_FOOTER_THREADS = 16
_CACHED_FOOTERS = 16
_SKIPPED_BYTES = 32 << 20
_SMALL_BYTES = 8 << 20
MOST_ROW_BYTES = 256 << 20
"""Maximum average size of a row in a row group, by its metadata; a part of a row cannot be decoded by itself."""


@dataclass(frozen=True)
class _Footer:
    """The metadata of one file."""

    file: DataFile
    stamp: tuple[int, int]
    schema: pa.Schema
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    """Uncompressed size of each row group."""
    selected: float
    """Share of the selected columns in `group_bytes`."""
    metadata: pq.FileMetaData | None


class ParquetSource:
    """One or many Parquet files. The constructor reads the footers of all of them.

    Args:
        files: The files, in order.
        columns: Columns to hand out, in this order; None means all.

    Raises:
        InputError: Lists every error that the metadata shows: files that are missing, truncated or not Parquet, missing
            columns, schemas that differ, or no rows at all.
    """

    def __init__(self, files: Sequence[DataFile], *, columns: Sequence[str] | None = None) -> None:
        footers, errors = _read_footers(files, columns)
        self.schema = pa.schema([])
        if footers:
            self.schema, mismatches = _project([(f.file.name, f.schema) for f in footers], columns)
            errors += mismatches
        if not errors and not any(sum(footer.group_rows) for footer in footers):
            errors.append(f"no rows in {', '.join(footer.file.name for footer in footers)}")
        if errors:
            raise _input_error(errors)
        # The metadata of a few files is kept, to read no footer again. For many wide files it would fill the memory.
        footers = footers if len(footers) <= _CACHED_FOOTERS else [replace(f, metadata=None) for f in footers]
        self._groups = [(footer, index) for footer in footers for index in range(len(footer.group_rows))]
        self.group_rows = tuple(footer.group_rows[index] for footer, index in self._groups)
        self._open: tuple[_Footer, pq.ParquetFile] | None = None
        self._row_bytes = 0.0
        """Size of a row, from the rows decoded most recently."""
        sizes = [f"{os.path.basename(f.file.path)}:{f.stamp[0]}:{f.group_rows}" for f in footers]
        self.fingerprint = xxhash.xxh3_64_hexdigest("\0".join(sizes).encode())

    def reach(self, group: int, max_bytes: int) -> int:
        """See `Source`; small row groups of a file are read together, because each read has a fixed cost."""
        footer, index = self._groups[group]
        rows, size = footer.group_rows[index], footer.group_bytes[index]
        for more, bytes_ in zip(footer.group_rows[index + 1 :], footer.group_bytes[index + 1 :], strict=True):
            size += bytes_
            if size * footer.selected > max_bytes:
                break
            rows += more
        return rows

    def read(self, group: int, first: int, end: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """See `Source`.

        Raises:
            InputError: The file cannot be read, or is not the one whose metadata was read; names file and row group.
        """
        footer, index = self._groups[group]
        ends = [self.group_rows[group]]
        while ends[-1] < end:
            ends.append(ends[-1] + self.group_rows[group + len(ends)])
        label = f"{footer.file.name}, row group {index}" + (f" to {index + len(ends) - 1}" if ends[1:] else "")
        at = 0
        try:
            for raw in self._decode(footer, range(index, index + len(ends)), first, max_bytes):
                low, at = max(first - at, 0), at + raw.num_rows
                if low < raw.num_rows:
                    yield _conform(raw.slice(low, end - (at - raw.num_rows) - low), self.schema)
            footer.file.require(footer.stamp, label)
        except InputError:
            raise
        except Exception as error:
            self.close()
            footer.file.require(footer.stamp, label)
            if not ends[1:]:
                raise InputError(f"Cannot read {label}: {error}") from error
            # Read the row groups one by one, to yield the rows before the broken one and then its error.
            for number, (start, last) in enumerate(zip([0, *ends], ends, strict=False), group):
                if max(at, first) < last:
                    yield from self.read(number, max(at, first, start) - start, min(end, last) - start, max_bytes)
            return
        if at < end:
            raise InputError(f"{label}: {at} rows, but the footer states {ends[-1]}")

    def _decode(self, footer: _Footer, indices: range, skipped: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of row groups, the `skipped` first ones included, in batches of about `max_bytes`."""
        size = sum(footer.group_bytes[index] for index in indices) * footer.selected
        total = sum(footer.group_rows[index] for index in indices)
        # Repeated values are stored once, so they decode to much more than the metadata states. Therefore the size of
        # rows that were already decoded counts, too.
        rows_per_byte = 1 / max(size / max(total, 1), self._row_bytes, 1.0)
        # Decode skipped rows in one go: in small batches, a wide table would take several times as long.
        rows = max(1, int(rows_per_byte * max_bytes), min(skipped, int(rows_per_byte * _SKIPPED_BYTES)))
        # For a small batch, passing each column to a thread costs more than decoding it.
        threads = min(rows, total) > _SMALL_BYTES * rows_per_byte
        file = self._opened(footer)
        for raw in file.iter_batches(rows, row_groups=indices, columns=self.schema.names, use_threads=threads):
            self._row_bytes = raw.nbytes / raw.num_rows
            yield raw

    def _opened(self, footer: _Footer) -> pq.ParquetFile:
        """Return the open file; only one is open at a time."""
        if self._open is None or self._open[0] is not footer:
            self.close()
            data = footer.file
            handle = data.filesystem.open_input_file(data.path)
            file = pq.ParquetFile(
                handle, metadata=footer.metadata, pre_buffer=not data.local, page_checksum_verification=True
            )
            self._open = footer, file
        return self._open[1]

    def close(self) -> None:
        """See `Source`."""
        if self._open is not None:
            self._open[1].close(force=True)
        self._open = None


def _read_footers(files: Sequence[DataFile], columns: Sequence[str] | None) -> tuple[list[_Footer], list[str]]:
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        results = list(pool.map(lambda file: _read_footer(file, columns), files))
    footers = [result for result in results if isinstance(result, _Footer)]
    return footers, [result for result in results if isinstance(result, str)]


def _read_footer(file: DataFile, columns: Sequence[str] | None) -> _Footer | str:
    """Return the footer of a file, or a description of its fault."""
    try:
        stamp = file.stamp()
        with file.filesystem.open_input_file(file.path) as handle:
            return _footer_of(file, stamp, pq.read_metadata(handle), columns)
    except InputError as error:
        return str(error)
    except pa.ArrowException as error:
        return f"{file.name}: not a complete Parquet file ({error})"
    except Exception as error:  # noqa: BLE001 - each file system has its own errors
        return f"{file.name}: {type(error).__name__}: {error}"


def _footer_of(
    file: DataFile, stamp: tuple[int, int], metadata: pq.FileMetaData, columns: Sequence[str] | None
) -> _Footer:
    """Return the footer of a file; refuse rows that are too large to decode."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows, sizes = tuple(group.num_rows for group in groups), tuple(group.total_byte_size for group in groups)
    selected = _share_of(columns, metadata)
    for index, (size, count) in enumerate(zip(sizes, rows, strict=True)):
        if size * selected > MOST_ROW_BYTES * max(count, 1):
            raise InputError(
                f"{file.name}, row group {index}: {count} rows decode to {int(size * selected):,} bytes, more than "
                f"{MOST_ROW_BYTES:,} each; store large values in separate files"
            )
    return _Footer(file, stamp, metadata.schema.to_arrow_schema(), rows, sizes, selected, metadata)


def _share_of(columns: Sequence[str] | None, metadata: pq.FileMetaData) -> float:
    """Return the share of `columns` in the bytes of the first row group."""
    if columns is None or not metadata.num_row_groups:
        return 1.0
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    selected = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".", 1)[0] in columns)
    return float(selected / max(sum(c.total_uncompressed_size for c in chunks), 1))


_PATHS = (str, os.PathLike)
_TABLES = (pa.Table, pa.RecordBatch)


def open_source(given: Any, *, columns: Sequence[str] | None, filesystem: Any) -> Source:
    """Return the source for paths, tables, record batches or a data frame.

    Raises:
        TypeError: `given` is something else.
        InputError: The data cannot be used; lists every error that metadata shows.
    """
    if hasattr(given, "__arrow_c_stream__") and not isinstance(given, pa.Table):
        given = pa.table(given)
    items = _items(given)
    if items and isinstance(items[0], _TABLES):
        return TableSource(items, columns=columns)
    return ParquetSource(expand(items, filesystem=filesystem), columns=columns)


def _items(given: Any) -> list[Any]:
    """Return all paths or all tables in `given`. Refuse at the first other item, because an iterable may be endless."""
    if isinstance(given, (*_PATHS, *_TABLES)):
        return [given]
    items: list[Any] = []
    for item in given if isinstance(given, Iterable) and not isinstance(given, bytes | Mapping) else [given]:
        kind = _TABLES if isinstance(items[0] if items else item, _TABLES) else _PATHS
        if not isinstance(item, kind):
            raise TypeError(
                "Invalid `source`. Expected paths, URLs, Arrow tables, record batches or a data frame, but received "
                f"{shortened(repr(item), 200)}{' among others' if items else ''}. A Hugging Face dataset is given as "
                "`dataset.with_format('arrow')[:]`; ready-made batches are given to the Trainer as they are."
            )
        items.append(item)
    return items
