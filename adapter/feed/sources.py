"""What a feed reads from: row groups that can be decoded one by one, in any order.

A source knows the number of rows of each group without decoding it. That is what makes the order, the sharding and
the position arithmetic, and lets a resume go straight to its row group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ..exceptions import InputError
from .filtering import as_expression, mask
from .schema import conform, project

__all__ = ["Decoded", "Numbers", "Source", "TableSource", "fingerprint", "input_error"]

Numbers: TypeAlias = range | npt.NDArray[np.int64]
"""Row numbers within the file, one for each row of a batch."""

Decoded: TypeAlias = tuple[pa.RecordBatch, Numbers]


class Source(Protocol):
    """Row groups with known row counts. Methods are called from one thread at a time."""

    schema: pa.Schema
    """Schema of every batch."""
    group_rows: tuple[int, ...]
    """Rows of each group that are handed out, after filters."""
    fingerprint: str
    """Changes when the rows, or their order, may have changed; does not depend on where the files lie."""

    def read(self, group: int, max_bytes: int) -> Iterator[Decoded]:
        """The rows of a group in order, in batches of about `max_bytes` or less where that can be had."""
        ...

    def label(self, group: int) -> str:
        """The group, for people: ``a.parquet, row group 3``."""
        ...

    def file(self, group: int) -> str:
        """Name of the file that holds the group."""
        ...

    def close(self) -> None:
        """Give open files back; reading again opens them again."""


class TableSource:
    """Tables and record batches in memory, or mapped into it; without filters nothing is copied.

    Args:
        tables: Tables or record batches of one schema; each chunk becomes a group.
        columns: Columns to hand out, in this order; None means all.
        filters: See `as_expression`; rows for which it is not true are left out.
        name: What errors and ledger call the data.

    Raises:
        InputError: A column is missing, schemas differ, or the tables hold no rows.
    """

    def __init__(
        self,
        tables: Iterable[pa.Table | pa.RecordBatch],
        *,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        name: str = "table",
    ) -> None:
        given = list(tables)
        self._name = name
        self.schema, faults = project([(f"{name} {i}", table.schema) for i, table in enumerate(given)], columns)
        if faults:
            raise input_error(faults)
        self._groups = list(self._decoded(given, as_expression(filters)))
        self.group_rows = tuple(batch.num_rows for batch, _ in self._groups)
        if not sum(self.group_rows):
            raise input_error([f"{name}: no rows" + (" pass the filters" if filters is not None else "")])
        self.fingerprint = fingerprint([f"{self.group_rows}"])

    def _decoded(self, tables: Iterable[pa.Table | pa.RecordBatch], expression: Any) -> Iterator[Decoded]:
        start = 0
        for table in tables:
            for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
                numbers: Numbers = range(start, start + batch.num_rows)
                start += batch.num_rows
                rows = conform(batch, self.schema)
                if expression is not None and batch.num_rows:
                    keep = mask(batch, expression)
                    rows, numbers = rows.filter(keep), np.asarray(numbers)[keep.to_numpy(zero_copy_only=False)]
                yield rows, numbers

    def read(self, group: int, max_bytes: int) -> Iterator[Decoded]:  # noqa: ARG002 - nothing is decoded
        """See `Source`; a group is handed out whole, because that costs nothing."""
        yield self._groups[group]

    def label(self, group: int) -> str:
        """See `Source`."""
        return f"{self._name}, chunk {group}"

    def file(self, group: int) -> str:  # noqa: ARG002 - all groups are of one table
        """See `Source`."""
        return self._name

    def close(self) -> None:
        """See `Source`."""


def input_error(faults: Sequence[str]) -> InputError:
    """One error that lists all of `faults`."""
    if len(faults) == 1:
        return InputError(f"Cannot read the training data: {faults[0]}")
    return InputError("Cannot read the training data:" + "".join(f"\n- {fault}" for fault in faults))


def fingerprint(facts: Iterable[str]) -> str:
    """A short digest of `facts`, equal on every machine."""
    digest = xxhash.xxh3_64()
    for fact in facts:
        digest.update(fact.encode())
        digest.update(b"\0")
    return digest.hexdigest()
