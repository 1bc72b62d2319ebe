"""The sources of a feed: row groups that can be decoded one by one, in any order.

A source knows the number of rows of each group without decoding it. That is what makes the order, the sharding and
the position arithmetic, and lets a resume go straight to its row group.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import xxhash

from ..contract.exceptions import InputError
from .files import DataFile, expand
from .filters import as_expression, error_of, mask
from .schema import conform, project

__all__ = ["ParquetSource", "Source", "TableSource", "open_source"]

_MOST_ERRORS = 40


class Source(Protocol):
    """Row groups with known row counts. Methods are called from one thread at a time."""

    schema: pa.Schema
    """Schema of every batch."""
    group_rows: tuple[int, ...]
    """Rows of each group that are handed out, after filters."""
    row_bytes: float
    """Mean size of a decoded row, by what is known without decoding."""
    fingerprint: str
    """Changes when the rows, or their order, may have changed; does not depend on where the files lie."""

    def together(self, first: int, last: int, max_bytes: int) -> bool:
        """Whether the groups from `first` to `last` are best read in one go, within about `max_bytes`."""
        ...

    def read(self, first: int, last: int, max_bytes: int, skip: int = 0) -> Iterator[pa.RecordBatch]:
        """The rows of the groups from `first` to `last` in order, in batches of about `max_bytes` where possible.

        The caller will not use the first `skip` rows, but wants them counted.
        """
        ...

    def label(self, group: int) -> str:
        """The group, for people: ``a.parquet, row group 3``."""
        ...

    def close(self) -> None:
        """Give open files back; reading again opens them again."""


class TableSource:
    """Tables and record batches in memory, or mapped into it; without filters nothing is copied.

    Args:
        tables: Name and table or record batch; each chunk becomes a group. Names are what errors say.
        columns: Columns to hand out, in this order; None means all.
        filters: See `as_expression`; rows for which it is not true are left out.
        files: The file behind each table, where there is one, and its stamp when it was opened.

    Raises:
        InputError: A column is missing, schemas differ, or the tables hold no rows.
    """

    def __init__(
        self,
        tables: Iterable[tuple[str, pa.Table | pa.RecordBatch]],
        *,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        files: Mapping[str, tuple[DataFile, tuple[int, int]]] | None = None,
    ) -> None:
        given = list(tables)
        self._files = dict(files or {})
        self.schema, errors = project([(name, table.schema) for name, table in given], columns)
        expression = as_expression(filters)
        if expression is not None and not errors:
            errors = [f"{name}: {error}" for name, t in given if (error := error_of(expression, t.schema)) is not None]
        if errors:
            raise input_error(errors)
        groups = [(name, group) for name, table in given for group in self._decoded(table, expression)]
        self._names, self._groups = [name for name, _ in groups], [group for _, group in groups]
        self.group_rows = tuple(batch.num_rows for batch in self._groups)
        if not sum(self.group_rows):
            raise input_error([f"no rows {'pass the filters' if filters is not None else ''} in {given[0][0]}"])
        self.row_bytes = sum(batch.nbytes for batch in self._groups) / sum(self.group_rows)
        facts = [f"{os.path.basename(file.path)}:{size}" for file, (size, _) in self._files.values()]
        filtered = [] if expression is None else [str(expression)]
        self.fingerprint = fingerprint([*facts, str(self.group_rows), *filtered])

    def _decoded(self, table: pa.Table | pa.RecordBatch, expression: Any) -> Iterator[pa.RecordBatch]:
        for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
            rows = conform(batch, self.schema)
            yield rows.filter(mask(batch, expression)) if expression is not None and batch.num_rows else rows

    def together(self, first: int, last: int, max_bytes: int) -> bool:
        """See `Source`."""
        return False

    def read(self, first: int, last: int, max_bytes: int, skip: int = 0) -> Iterator[pa.RecordBatch]:
        """See `Source`; a group is handed out whole, because that costs nothing.

        Raises:
            InputError: The file behind it has changed, and its rows, which are mapped into memory, with it.
        """
        for group in range(first, last + 1):
            if self._names[group] in self._files:
                file, stamp = self._files[self._names[group]]
                file.require(stamp, self.label(group))
            yield self._groups[group]

    def label(self, group: int) -> str:
        """See `Source`."""
        return f"{self._names[group]}, chunk {group - self._names.index(self._names[group])}"

    def close(self) -> None:
        """See `Source`."""


def input_error(errors: Sequence[str]) -> InputError:
    """One error that lists `errors`, and of very many how many more there are."""
    if len(errors) == 1:
        return InputError(f"Cannot read the training data: {errors[0]}")
    shown = [*errors[:_MOST_ERRORS], *([f"and {len(errors) - _MOST_ERRORS} more"] if errors[_MOST_ERRORS:] else [])]
    return InputError("Cannot read the training data:" + "".join(f"\n- {error}" for error in shown))


def fingerprint(facts: Iterable[str]) -> str:
    """A short digest of `facts`, equal on every machine."""
    digest = xxhash.xxh3_64()
    for fact in facts:
        digest.update(fact.encode())
        digest.update(b"\0")
    return digest.hexdigest()


_FOOTER_THREADS = 16
_OPEN_FILES = 16
_SKIPPED_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20
MOST_ROW_BYTES = 256 << 20
"""The most that a row may take on average in a row group, by its metadata: no less than a row can be decoded."""


@dataclass(frozen=True)
class _Footer:
    """The metadata of one file."""

    file: DataFile
    stamp: tuple[int, int]
    schema: pa.Schema
    group_rows: tuple[int, ...]
    """Rows of each row group, before filters."""
    group_bytes: tuple[int, ...]
    """Uncompressed size of the wanted columns of each row group."""
    metadata: pq.FileMetaData | None


@dataclass(frozen=True)
class _Group:
    """Where one row group lies."""

    footer: _Footer
    index: int

    @property
    def rows(self) -> int:
        return self.footer.group_rows[self.index]

    @property
    def bytes(self) -> int:
        return self.footer.group_bytes[self.index]

    @property
    def label(self) -> str:
        return f"{self.footer.file.name}, row group {self.index}"

    def require_unchanged(self) -> None:
        self.footer.file.require(self.footer.stamp, self.label)

    def broken(self, error: Exception) -> InputError:
        return InputError(f"Cannot read {self.label}: {error}")


class ParquetSource:
    """One or many Parquet files. Making one reads all footers, and with filters the columns that they name.

    Args:
        files: The files, in order.
        columns: Columns to hand out, in this order; None means all.
        filters: See `as_expression`; rows for which it is not true are left out.

    Raises:
        InputError: Lists every error that the metadata tells: files that are missing, truncated or no Parquet, columns
            that are missing, schemas that differ, no rows at all.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        *,
        columns: Sequence[str] | None = None,
        filters: Any = None,
    ) -> None:
        self._filter = as_expression(filters)
        footers, errors = _read_footers(files, columns)
        self.schema = pa.schema([])
        if footers:
            self.schema, mismatches = project([(f.file.name, f.schema) for f in footers], columns)
            errors += mismatches
            errors += self._filter_errors(footers)
        if not errors and not any(sum(footer.group_rows) for footer in footers):
            errors.append(f"no rows in {', '.join(footer.file.name for footer in footers)}")
        if errors:
            raise input_error(errors)
        # Metadata of many wide files would fill the memory; of a few it saves reading their footers again.
        footers = footers if len(footers) <= _OPEN_FILES else [replace(f, metadata=None) for f in footers]
        self._groups = [_Group(footer, index) for footer in footers for index in range(len(footer.group_rows))]
        self.group_rows = self._count()
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._expansion = 1.0
        self.row_bytes = sum(g.bytes for g in self._groups) / sum(g.rows for g in self._groups)
        sizes = [f"{os.path.basename(f.file.path)}:{f.stamp[0]}:{f.group_rows}" for f in footers]
        filtered = [] if self._filter is None else [str(self._filter)]
        self.fingerprint = fingerprint([*sizes, str(self.group_rows), *filtered])

    def _filter_errors(self, footers: Sequence[_Footer]) -> list[str]:
        if self._filter is None:
            return []
        found = ((footer.file.name, error_of(self._filter, footer.schema)) for footer in footers)
        return [f"{name}: {error}" for name, error in found if error is not None]

    def _count(self) -> tuple[int, ...]:
        if self._filter is None:
            return tuple(group.rows for group in self._groups)
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            counts = tuple(pool.map(self._count_group, self._groups))
        if not sum(counts):
            raise input_error([f"no row passes the filter {self._filter}"])
        return counts

    def _count_group(self, group: _Group) -> int:
        try:
            return int(self._fragment(group).count_rows(filter=self._filter))
        except Exception as error:
            raise group.broken(error) from error

    def _fragment(self, group: _Group) -> ds.ParquetFileFragment:
        file = group.footer.file
        return ds.ParquetFileFormat().make_fragment(file.path, file.filesystem, row_groups=[group.index])

    def together(self, first: int, last: int, max_bytes: int) -> bool:
        """See `Source`."""
        groups = self._groups[first : last + 1]
        one_file = groups[0].footer is groups[-1].footer
        return one_file and sum(group.bytes for group in groups) * self._expansion <= max_bytes

    def read(self, first: int, last: int, max_bytes: int, skip: int = 0) -> Iterator[pa.RecordBatch]:
        """See `Source`.

        Raises:
            InputError: The file cannot be read, or is not the one whose metadata was read; names file and row group.
        """
        groups = self._groups[first : last + 1]
        batches = self._batches(groups, max_bytes, skip)
        return batches if self._filter is None else self._filtered(batches, groups)

    def _filtered(self, batches: Iterator[pa.RecordBatch], groups: Sequence[_Group]) -> Iterator[pa.RecordBatch]:
        keep = np.concatenate([self._mask(group) for group in groups])
        offset = 0
        for batch in batches:
            yield batch.filter(pa.array(keep[offset : offset + batch.num_rows]))
            offset += batch.num_rows

    def _mask(self, group: _Group) -> Any:
        try:
            table = self._fragment(group).scanner(columns={"keep": self._filter}).to_table()
        except Exception as error:
            raise group.broken(error) from error
        return table.column("keep").fill_null(False).to_numpy()

    def _batches(self, groups: Sequence[_Group], max_bytes: int, skip: int = 0) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            for batch in self._decode(groups, max_bytes, skip):
                yield batch
                rows += batch.num_rows
        except InputError:
            raise
        except Exception as error:
            self._forget(groups[0].footer.file)
            if len(groups) == 1:
                raise groups[0].broken(error) from error
            yield from self._one_by_one(groups, rows, max_bytes)
            return
        groups[-1].require_unchanged()
        if rows != sum(group.rows for group in groups):
            raise InputError(f"{groups[-1].label}: {rows} rows, but the footer states another number")

    def _one_by_one(self, groups: Sequence[_Group], skip: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """The rows after the first `skip`: those before the group that cannot be read, then its error."""
        for group in groups:
            if skip >= group.rows:
                skip -= group.rows
                continue
            for batch in self._batches([group], max_bytes):
                if skip < batch.num_rows:
                    yield batch.slice(skip)
                skip = max(skip - batch.num_rows, 0)

    def _decode(self, groups: Sequence[_Group], max_bytes: int, skip: int) -> Iterator[pa.RecordBatch]:
        groups[0].require_unchanged()
        size, total = sum(group.bytes for group in groups), sum(group.rows for group in groups)
        rows_per_byte = total / max(size * self._expansion, 1)
        # What is skipped is decoded in one go: with small batches a wide table takes several times as long.
        rows = max(1, int(rows_per_byte * max_bytes), min(skip, int(rows_per_byte * _SKIPPED_BYTES)))
        indices = [group.index for group in groups]
        # Handing each column to a thread costs more than a small batch of them takes to decode.
        threads = rows > _SMALL_BYTES * rows_per_byte
        file = self._opened(groups[0])
        for raw in file.iter_batches(rows, row_groups=indices, columns=self.schema.names, use_threads=threads):
            # Repeated values are stored once and decode to much more than the metadata tells.
            self._expansion = max(0.5, raw.nbytes / max(size * raw.num_rows / total, 1))
            yield conform(raw, self.schema)

    def _opened(self, group: _Group) -> pq.ParquetFile:
        data = group.footer.file
        if data.name not in self._open:
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close(force=True)
            handle = data.filesystem.open_input_file(data.path)
            metadata = group.footer.metadata
            self._open[data.name] = pq.ParquetFile(
                handle, metadata=metadata, pre_buffer=not data.local, page_checksum_verification=True
            )
        self._open.move_to_end(data.name)
        return self._open[data.name]

    def _forget(self, file: DataFile) -> None:
        opened = self._open.pop(file.name, None)
        if opened is not None:
            opened.close(force=True)

    def label(self, group: int) -> str:
        """See `Source`."""
        return self._groups[group].label

    def close(self) -> None:
        """See `Source`."""
        while self._open:
            self._open.popitem()[1].close(force=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


def _read_footers(files: Sequence[DataFile], columns: Sequence[str] | None) -> tuple[list[_Footer], list[str]]:
    if len(files) == 1:
        results = [_read_footer(files[0], columns)]
    else:
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            results = list(pool.map(lambda file: _read_footer(file, columns), files))
    footers = [result for result in results if isinstance(result, _Footer)]
    return footers, [result for result in results if isinstance(result, str)]


def _read_footer(file: DataFile, columns: Sequence[str] | None) -> _Footer | str:
    try:
        stamp = file.stamp()
        with file.filesystem.open_input_file(file.path) as handle:
            metadata = pq.read_metadata(handle)
            rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            sizes = _group_bytes(metadata, columns)
            for group, (size, count) in enumerate(zip(sizes, rows, strict=True)):
                if size > MOST_ROW_BYTES * max(count, 1):
                    return (
                        f"{file.name}, row group {group}: {count} rows decode to {size:,} bytes, more than "
                        f"{MOST_ROW_BYTES:,} each; store large values in files of their own"
                    )
            return _Footer(file, stamp, metadata.schema.to_arrow_schema(), rows, sizes, metadata)
    except InputError as error:
        return str(error)
    except (pa.ArrowException, OSError) as error:
        number = error.errno if isinstance(error, OSError) else None  # Arrow has some of its own, without a number
        if number is not None:
            return f"{file.name}: cannot be read: {os.strerror(number)}"
        return f"{file.name}: not a complete Parquet file ({error})"
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        return f"{file.name}: {type(error).__name__}: {error}"


def _group_bytes(metadata: pq.FileMetaData, columns: Sequence[str] | None) -> tuple[int, ...]:
    """Uncompressed size of `columns` in each row group; the share of the columns is that of the first row group."""
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    if columns is None or not sizes:
        return tuple(sizes)
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    wanted = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".", 1)[0] in set(columns))
    share = wanted / max(sum(c.total_uncompressed_size for c in chunks), 1)
    return tuple(int(size * share) for size in sizes)


_PATHS = (str, os.PathLike)
_TABLES = (pa.Table, pa.RecordBatch)
_IPC_SUFFIXES = (".arrow", ".ipc", ".feather")


def open_source(given: Any, *, columns: Sequence[str] | None, filters: Any, filesystem: Any) -> Source:
    """The source behind paths, tables, record batches, a data frame, a Hugging Face dataset, or a source.

    Raises:
        TypeError: `given` is none of these.
        InputError: The data cannot be used; lists every error that metadata can tell.
    """
    if hasattr(given, "group_rows"):
        source: Source = given
        return source
    if _is_hugging_face(given):
        return TableSource([("dataset", _hugging_face_table(given))], columns=columns, filters=filters)
    if hasattr(given, "__arrow_c_stream__") and not isinstance(given, pa.Table):
        given = pa.table(given)
    if isinstance(given, _TABLES):
        return TableSource([("table", given)], columns=columns, filters=filters)
    items = _items(given)
    if items and isinstance(items[0], _TABLES):
        named = [(f"table {i}", item) for i, item in enumerate(items)]
        return TableSource(named, columns=columns, filters=filters)
    files = expand(items, filesystem=filesystem)
    mapped = [file.path.endswith(_IPC_SUFFIXES) for file in files]
    if all(mapped):
        return _ipc_source(files, columns, filters)
    if any(mapped):
        raise InputError("Arrow IPC files and Parquet files cannot be mixed in one feed.")
    return ParquetSource(files, columns=columns, filters=filters)


def _items(given: Any) -> list[Any]:
    """All paths, or all tables, of what was given; the first that is neither ends it, since a stream may be endless."""
    if isinstance(given, str | os.PathLike):
        return [given]
    items: list[Any] = []
    for item in given if isinstance(given, Iterable) and not isinstance(given, bytes | Mapping) else [given]:
        kind = _TABLES if isinstance(items[0] if items else item, _TABLES) else _PATHS
        if not isinstance(item, kind):
            raise TypeError(
                "Invalid `source`. Expected paths or URLs, Arrow tables or record batches, a data frame or a Hugging "
                f"Face dataset, but received {_short(item)}{' among others' if items else ''}. Ready-made "
                "batches are given to the Trainer as they are."
            )
        items.append(item)
    return items


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) < 200 else f"{text[:199]}…"


def _is_hugging_face(given: Any) -> bool:
    return hasattr(given, "features") and hasattr(getattr(given, "data", None), "table")


def _hugging_face_table(dataset: Any) -> pa.Table:
    # A dataset that was shuffled or selected from keeps its table and a list of indices.
    whole = dataset.flatten_indices() if getattr(dataset, "_indices", None) is not None else dataset
    return whole.data.table


def _ipc_source(files: Iterable[DataFile], columns: Sequence[str] | None, filters: Any) -> TableSource:
    tables, opened, errors = [], {}, []
    for file in files:
        try:
            opened[file.name] = file, file.stamp()
            tables.append((file.name, _ipc_table(file)))
        except InputError as error:
            errors.append(str(error))
        except (pa.ArrowException, OSError) as error:
            errors.append(f"{file.name}: not a complete Arrow IPC file ({error})")
    if errors:
        raise input_error(errors)
    return TableSource(tables, columns=columns, filters=filters, files=opened)


def _ipc_table(file: DataFile) -> pa.Table:
    handle = pa.memory_map(file.path) if file.local else file.filesystem.open_input_file(file.path)
    if handle.read(6) == b"ARROW1":
        return pa.ipc.open_file(handle).read_all()
    handle.seek(0)
    return pa.ipc.open_stream(handle).read_all()
