"""Parquet files as a source: footers first, row groups on demand."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ..exceptions import InputError
from .files import DataFile, PathLike, expand
from .filtering import as_expression
from .schema import conform, project
from .sources import Decoded, fingerprint, input_error

__all__ = ["ParquetSource"]

_FOOTER_THREADS = 16
_OPEN_FILES = 16


@dataclass(frozen=True)
class _Footer:
    """What one file's metadata tells."""

    file: DataFile
    stamp: tuple[int, int]
    schema: pa.Schema
    group_rows: tuple[int, ...]
    """Rows of each row group, before filters."""


@dataclass(frozen=True)
class _Group:
    """Where one row group lies."""

    footer: _Footer
    index: int
    first_row: int
    """Number of its first row within the file."""

    @property
    def rows(self) -> int:
        return self.footer.group_rows[self.index]


class ParquetSource:
    """One or many Parquet files. Making one reads all footers, and with filters the columns that they name.

    Args:
        paths: Paths, folders, patterns or URLs; see `expand`.
        columns: Columns to hand out, in this order; None means all.
        filters: See `as_expression`; rows for which it is not true are left out.
        filesystem: See `expand`.

    Raises:
        InputError: Lists every fault that the metadata tells: files that are missing, truncated or no Parquet, columns
            that are missing, schemas that differ, no rows at all.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        filesystem: Any = None,
    ) -> None:
        self._filter = as_expression(filters)
        footers, faults = _read_footers(expand(paths, filesystem=filesystem))
        self.schema = pa.schema([])
        if footers:
            self.schema, mismatches = project([(f.file.name, f.schema) for f in footers], columns)
            faults += mismatches
        if not faults and not any(sum(footer.group_rows) for footer in footers):
            faults.append(f"no rows in {', '.join(footer.file.name for footer in footers)}")
        if faults:
            raise input_error(faults)
        self._groups = [group for footer in footers for group in _groups(footer)]
        self.group_rows = self._count()
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        sizes = [f"{os.path.basename(f.file.path)}:{f.stamp[0]}:{f.group_rows}" for f in footers]
        self.fingerprint = fingerprint([*sizes, str(sum(self.group_rows))])

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
        except (pa.ArrowException, OSError) as error:
            raise input_error([f"{_label(group)}: filter {self._filter}: {error}"]) from error

    def _fragment(self, group: _Group) -> ds.ParquetFileFragment:
        file = group.footer.file
        return ds.ParquetFileFormat().make_fragment(file.path, file.filesystem, row_groups=[group.index])

    def read(self, group: int, max_bytes: int) -> Iterator[Decoded]:
        """See `Source`.

        Raises:
            InputError: The file cannot be read, or is not the one whose metadata was read; names file and row group.
        """
        where = self._groups[group]
        try:
            yield from self._read(where, max_bytes)
        except (pa.ArrowException, OSError) as error:
            self._open.pop(where.footer.file.name, None)
            raise InputError(f"{_label(where)}: {error}") from error

    def _read(self, group: _Group, max_bytes: int) -> Iterator[Decoded]:
        keep = self._mask(group) if self._filter is not None else None
        offset = 0
        for raw in self._decode(group, max_bytes):
            batch, size = conform(raw, self.schema), raw.num_rows
            first = group.first_row + offset
            if keep is None:
                yield batch, range(first, first + size)
            else:
                part = keep[offset : offset + size]
                yield batch.filter(pa.array(part)), first + np.flatnonzero(part)
            offset += size
        _require_unchanged(group)
        if offset != group.rows:
            raise InputError(f"{_label(group)}: {offset} rows, but the footer said {group.rows}")

    def _mask(self, group: _Group) -> Any:
        table = self._fragment(group).scanner(columns={"keep": self._filter}).to_table()
        return table.column("keep").fill_null(False).to_numpy()

    def _decode(self, group: _Group, max_bytes: int) -> Iterator[pa.RecordBatch]:
        file = self._opened(group)
        _require_unchanged(group)
        columns = self.schema.names
        rows = _rows_within(file.metadata.row_group(group.index), set(columns), max_bytes)
        if rows >= group.rows:
            yield from file.read_row_group(group.index, columns=columns).to_batches()
        else:
            yield from file.iter_batches(rows, row_groups=[group.index], columns=columns)

    def _opened(self, group: _Group) -> pq.ParquetFile:
        data = group.footer.file
        if data.name not in self._open:
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close(force=True)
            self._open[data.name] = pq.ParquetFile(
                data.filesystem.open_input_file(data.path), pre_buffer=not data.local
            )
        self._open.move_to_end(data.name)
        return self._open[data.name]

    def label(self, group: int) -> str:
        """See `Source`."""
        return _label(self._groups[group])

    def file(self, group: int) -> str:
        """See `Source`."""
        return self._groups[group].footer.file.name

    def close(self) -> None:
        """See `Source`."""
        while self._open:
            self._open.popitem()[1].close(force=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


def _read_footers(files: Sequence[DataFile]) -> tuple[list[_Footer], list[str]]:
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        results = list(pool.map(_read_footer, files))
    footers = [result for result in results if isinstance(result, _Footer)]
    return footers, [result for result in results if isinstance(result, str)]


def _read_footer(file: DataFile) -> _Footer | str:
    try:
        stamp = file.stamp()
        with file.filesystem.open_input_file(file.path) as handle:
            metadata = pq.read_metadata(handle)
            rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            return _Footer(file, stamp, metadata.schema.to_arrow_schema(), rows)
    except InputError as error:
        return str(error)
    except (pa.ArrowException, OSError) as error:
        return f"{file.name}: not a whole Parquet file ({error})"


def _groups(footer: _Footer) -> Iterator[_Group]:
    first = 0
    for index, rows in enumerate(footer.group_rows):
        yield _Group(footer, index, first)
        first += rows


def _label(group: _Group) -> str:
    return f"{group.footer.file.name}, row group {group.index}"


def _require_unchanged(group: _Group) -> None:
    if group.footer.file.local and group.footer.file.stamp() != group.footer.stamp:
        raise InputError(f"{_label(group)}: the file changed while it was read; start again with the new file")


def _rows_within(row_group: pq.RowGroupMetaData, columns: set[str], max_bytes: int) -> int:
    """How many rows of the group fill `max_bytes` when decoded, judged by the uncompressed size in the footer."""
    size = row_group.total_byte_size
    if size <= max_bytes:
        return int(row_group.num_rows)
    chunks = (row_group.column(i) for i in range(row_group.num_columns))
    size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".", 1)[0] in columns)
    return max(1, int(row_group.num_rows * max_bytes / max(size, 1)))
