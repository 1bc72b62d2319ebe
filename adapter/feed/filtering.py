"""Row filters: which rows of a batch stay."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

__all__ = ["as_expression", "mask"]


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
        ) from error


def _tuples(filters: Any) -> Any:
    if not isinstance(filters, list | tuple):
        raise TypeError(f"{filters!r} is no list")
    if filters and isinstance(filters[0], str):
        column, operator, value = filters
        return column, operator, value
    return [_tuples(item) for item in filters]


def mask(batch: pa.RecordBatch, expression: pc.Expression) -> pa.BooleanArray:
    """For each row whether `expression` is true; null counts as not."""
    table = pa.Table.from_batches([batch])
    scanner = ds.dataset(table).scanner(columns={"keep": expression}, use_threads=False)
    return pc.fill_null(scanner.to_table().column("keep").combine_chunks(), fill_value=False)
