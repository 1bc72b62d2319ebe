"""Parquet files as a source: footers first, row groups on demand."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ..contract.exceptions import InputError
from .files import DataFile
from .filters import as_expression, error_of
from .schema import conform, project
from .sources import fingerprint, input_error

__all__ = ["ParquetSource"]

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
            raise _broken(group, error) from error

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
            raise _broken(group, error) from error
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
                raise _broken(groups[0], error) from error
            yield from self._one_by_one(groups, rows, max_bytes)
            return
        _require_unchanged(groups[-1])
        if rows != sum(group.rows for group in groups):
            raise InputError(f"{_label(groups[-1])}: {rows} rows, but the footer states another number")

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
        _require_unchanged(groups[0])
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
        return _label(self._groups[group])

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


def _label(group: _Group) -> str:
    return f"{group.footer.file.name}, row group {group.index}"


def _require_unchanged(group: _Group) -> None:
    try:
        group.footer.file.require(group.footer.stamp)
    except InputError as error:
        raise _broken(group, error) from error


def _broken(group: _Group, error: Exception) -> InputError:
    return InputError(f"Cannot read {_label(group)}: {error}")


def _group_bytes(metadata: pq.FileMetaData, columns: Sequence[str] | None) -> tuple[int, ...]:
    """Uncompressed size of `columns` in each row group; the share of the columns is that of the first row group."""
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    if columns is None or not sizes:
        return tuple(sizes)
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    wanted = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".", 1)[0] in set(columns))
    share = wanted / max(sum(c.total_uncompressed_size for c in chunks), 1)
    return tuple(int(size * share) for size in sizes)
