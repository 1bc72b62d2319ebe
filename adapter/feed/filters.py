"""Row filters: which rows of a batch stay."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from .schema import nearest_column

__all__ = ["as_expression", "error_of", "mask"]


def as_expression(filters: Any) -> pc.Expression | None:
    """An Arrow expression: given as such, or as `[[column, op, value], …]` (all must hold), or a list of those (any).

    Raises:
        ValueError: `filters` has another form.
    """
    if filters is None or isinstance(filters, pc.Expression):
        return filters
    try:
        return pq.filters_to_expression(_tuples(filters))
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(
            f"Invalid `filters`. Expected a list of [column, operator, value], but received {filters!r} ({error})."
        ) from None


def _tuples(filters: Any) -> Any:
    if not isinstance(filters, list | tuple):
        raise TypeError(f"{filters!r} is not a list")
    if filters and isinstance(filters[0], str):
        column, operator, value = filters
        return column, operator, value
    return [_tuples(item) for item in filters]


def error_of(expression: pc.Expression, schema: pa.Schema) -> str | None:
    """Why rows of `schema` cannot be filtered by `expression`, or None when they can."""
    try:
        mask(pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema), expression)
    except pa.ArrowException as error:
        missing = re.match(r"No match for FieldRef.Name\((.*)\) in ", str(error))
        if missing:
            return f"filter {expression}: no column {missing[1]!r}; {nearest_column(missing[1], schema.names)}"
        return f"filter {expression}: {error}"
    return None


def mask(batch: pa.RecordBatch, expression: pc.Expression) -> pa.BooleanArray:
    """For each row whether `expression` is true; null counts as not."""
    table = pa.Table.from_batches([batch])
    scanner = ds.dataset(table).scanner(columns={"keep": expression}, use_threads=False)
    return pc.fill_null(scanner.to_table().column("keep").combine_chunks(), fill_value=False)
