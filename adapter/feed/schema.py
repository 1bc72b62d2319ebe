"""One schema for all files of a feed, or a list of what stands against it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ..plumbing.text import closest

__all__ = ["conform", "nearest_column", "project"]


def project(named: Iterable[tuple[str, pa.Schema]], columns: Sequence[str] | None) -> tuple[pa.Schema, list[str]]:
    """The common schema of `columns` (None: all of the first) and every error that stands against it.

    The order of columns may differ between files, and so may nullability and metadata; names and types may not.
    """
    schemas = [(name, _plain(schema)) for name, schema in named]
    first_name, first = schemas[0]
    wanted = list(dict.fromkeys(first.names if columns is None else columns))
    errors = [error for name, schema in schemas for error in _missing(name, schema, wanted)]
    if errors:
        return first, errors
    for name, schema in schemas[1:]:
        errors += _differences(first_name, first, name, schema, wanted, all_columns=columns is None)
    if errors:
        return first, errors
    fields = [
        first.field(column).with_nullable(any(schema.field(column).nullable for _, schema in schemas))
        for column in wanted
    ]
    return pa.schema(fields, metadata=first.metadata), []


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema`, in its order; copies nothing but what `project` gave another type."""
    if batch.schema.equals(schema):
        return batch
    columns = [_decoded(batch.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _decoded(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_run_end_encoded(column.type):
        return pc.run_end_decode(column)
    return column if column.type.equals(kind) else column.cast(kind)


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema without encodings whose rows Arrow can neither reorder nor filter."""
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema], metadata=schema.metadata)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_run_end_encoded(kind):
        return kind.value_type
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def _missing(name: str, schema: pa.Schema, wanted: Sequence[str]) -> list[str]:
    known = schema.names
    errors = []
    for column in wanted:
        count = known.count(column)
        if count == 0:
            errors.append(f"{name}: no column {column!r}; {nearest_column(column, known)}")
        elif count > 1:
            errors.append(f"{name}: {count} columns are named {column!r}")
    return errors


def nearest_column(column: str, known: Sequence[str]) -> str:
    """The columns that may have been meant by one that does not exist."""
    near = closest(column, known, alike=0.5)
    return f"did you mean {near!r}?" if near else f"it has {_in_words(known)}"


def _in_words(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "") if names else "no columns"


def _differences(
    first_name: str, first: pa.Schema, name: str, schema: pa.Schema, wanted: Sequence[str], *, all_columns: bool
) -> list[str]:
    errors = [
        f"{name}: column {column!r} is {schema.field(column).type}, but {first.field(column).type} in {first_name}"
        for column in wanted
        if not schema.field(column).type.equals(first.field(column).type)
    ]
    extra = [column for column in schema.names if column not in wanted] if all_columns else []
    if extra:
        errors.append(f"{name}: columns {_in_words(extra)} are not in {first_name}; name `columns` to leave them out")
    return errors
