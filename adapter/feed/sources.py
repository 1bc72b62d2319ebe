"""The sources of a feed: row groups that can be decoded one by one, in any order.

A source knows the number of rows of each group without decoding it. That is what makes the order, the sharding and
the position arithmetic, and lets a resume go straight to its row group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from ..contract.exceptions import InputError
from .files import DataFile
from .filters import as_expression, error_of, mask
from .schema import conform, project

__all__ = ["Source", "TableSource", "fingerprint", "input_error"]

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
                self._require_unchanged(group)
            yield self._groups[group]

    def _require_unchanged(self, group: int) -> None:
        file, stamp = self._files[self._names[group]]
        try:
            file.require(stamp)
        except InputError as error:
            raise InputError(f"Cannot read {self.label(group)}: {error}") from error

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
