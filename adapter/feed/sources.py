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

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ..contract.exceptions import InputError
from .files import DataFile, expand
from .schema import conform, project

__all__ = ["ParquetSource", "Source", "TableSource", "open_source"]

_MOST_ERRORS = 40


class Source(Protocol):
    """Row groups with known row counts. Methods are called from one thread at a time."""

    schema: pa.Schema
    """Schema of every batch."""
    group_rows: tuple[int, ...]
    """Rows of each group."""
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
    """Tables and record batches in memory; nothing is copied.

    Args:
        tables: Name and table or record batch; each chunk becomes a group. Names are what errors say.
        columns: Columns to hand out, in this order; None means all.

    Raises:
        InputError: A column is missing, schemas differ, or the tables hold no rows.
    """

    def __init__(
        self,
        tables: Iterable[tuple[str, pa.Table | pa.RecordBatch]],
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        given = list(tables)
        self.schema, errors = project([(name, table.schema) for name, table in given], columns)
        if errors:
            raise input_error(errors)
        groups = [(name, conform(group, self.schema)) for name, table in given for group in _batches_of(table)]
        self._names, self._groups = [name for name, _ in groups], [group for _, group in groups]
        self.group_rows = tuple(batch.num_rows for batch in self._groups)
        if not sum(self.group_rows):
            raise input_error([f"no rows in {given[0][0]}"])
        self.fingerprint = fingerprint([str(self.group_rows)])

    def together(self, first: int, last: int, max_bytes: int) -> bool:
        """See `Source`."""
        return False

    def read(self, first: int, last: int, max_bytes: int, skip: int = 0) -> Iterator[pa.RecordBatch]:
        """See `Source`; a group is handed out whole, because that costs nothing."""
        yield from self._groups[first : last + 1]

    def label(self, group: int) -> str:
        """See `Source`."""
        return f"{self._names[group]}, chunk {group - self._names.index(self._names[group])}"

    def close(self) -> None:
        """See `Source`."""


def _batches_of(table: pa.Table | pa.RecordBatch) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = table.to_batches() if isinstance(table, pa.Table) else [table]
    return batches


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


class ParquetSource:
    """One or many Parquet files. Making one reads all footers.

    Args:
        files: The files, in order.
        columns: Columns to hand out, in this order; None means all.

    Raises:
        InputError: Lists every error that the metadata tells: files that are missing, truncated or no Parquet, columns
            that are missing, schemas that differ, no rows at all.
    """

    def __init__(self, files: Sequence[DataFile], *, columns: Sequence[str] | None = None) -> None:
        footers, errors = _read_footers(files, columns)
        self.schema = pa.schema([])
        if footers:
            self.schema, mismatches = project([(f.file.name, f.schema) for f in footers], columns)
            errors += mismatches
        if not errors and not any(sum(footer.group_rows) for footer in footers):
            errors.append(f"no rows in {', '.join(footer.file.name for footer in footers)}")
        if errors:
            raise input_error(errors)
        # Metadata of many wide files would fill the memory; of a few it saves reading their footers again.
        footers = footers if len(footers) <= _OPEN_FILES else [replace(f, metadata=None) for f in footers]
        self._groups = [_Group(footer, index) for footer in footers for index in range(len(footer.group_rows))]
        self.group_rows = tuple(group.rows for group in self._groups)
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._expansion = 1.0
        sizes = [f"{os.path.basename(f.file.path)}:{f.stamp[0]}:{f.group_rows}" for f in footers]
        self.fingerprint = fingerprint([*sizes, str(self.group_rows)])

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
        rows = 0
        try:
            for batch in self._decode(groups, max_bytes, skip):
                yield batch
                rows += batch.num_rows
        except InputError:
            raise
        except Exception as error:
            self._forget(groups[0].footer.file)
            if first == last:
                raise InputError(f"Cannot read {groups[0].label}: {error}") from error
            # One by one: the rows before the group that cannot be read, then its error.
            for group in range(first, last + 1):
                for batch in self.read(group, group, max_bytes) if rows < self.group_rows[group] else ():
                    yield batch.slice(min(rows, batch.num_rows))
                    rows = max(rows - batch.num_rows, 0)
                rows = max(rows - self.group_rows[group], 0)
            return
        groups[-1].require_unchanged()
        if rows != sum(group.rows for group in groups):
            raise InputError(f"{groups[-1].label}: {rows} rows, but the footer states another number")

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


def open_source(given: Any, *, columns: Sequence[str] | None, filesystem: Any) -> Source:
    """The source behind paths, tables, record batches, a data frame, or a source.

    Raises:
        TypeError: `given` is none of these.
        InputError: The data cannot be used; lists every error that metadata can tell.
    """
    if hasattr(given, "group_rows"):
        source: Source = given
        return source
    if hasattr(given, "__arrow_c_stream__") and not isinstance(given, pa.Table):
        given = pa.table(given)
    if isinstance(given, _TABLES):
        return TableSource([("table", given)], columns=columns)
    items = _items(given)
    if items and isinstance(items[0], _TABLES):
        return TableSource([(f"table {i}", item) for i, item in enumerate(items)], columns=columns)
    files = expand(items, filesystem=filesystem)
    if ipc := [file.name for file in files if file.path.endswith(_IPC_SUFFIXES)]:
        raise InputError(
            f"{ipc[0]} is an Arrow IPC file. Write it as Parquet, or return its table from a `data` function: "
            "`pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()`."
        )
    return ParquetSource(files, columns=columns)


def _items(given: Any) -> list[Any]:
    """All paths, or all tables, of what was given; the first that is neither ends it, since a stream may be endless."""
    if isinstance(given, str | os.PathLike):
        return [given]
    items: list[Any] = []
    for item in given if isinstance(given, Iterable) and not isinstance(given, bytes | Mapping) else [given]:
        kind = _TABLES if isinstance(items[0] if items else item, _TABLES) else _PATHS
        if not isinstance(item, kind):
            raise TypeError(
                "Invalid `source`. Expected paths or URLs, Arrow tables or record batches, or a data frame, but "
                f"received {item!r:.200}{' among others' if items else ''}. A Hugging Face dataset is given as "
                "`dataset.with_format('arrow')[:]`; ready-made batches are given to the Trainer as they are."
            )
        items.append(item)
    return items
