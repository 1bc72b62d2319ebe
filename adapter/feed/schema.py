"""One schema for all files of a feed, or a list of what stands against it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import pyarrow as pa

__all__ = ["conform", "project"]


def project(named: Iterable[tuple[str, pa.Schema]], columns: Sequence[str] | None) -> tuple[pa.Schema, list[str]]:
    """The common schema of `columns` (None: all of the first) and every fault that stands against it.

    The order of columns may differ between files, and so may nullability and metadata; names and types may not.
    """
    schemas = list(named)
    if not schemas:
        return pa.schema([]), ["no data: there is not one file or table"]
    first_name, first = schemas[0]
    wanted = list(columns) if columns is not None else first.names
    faults = [fault for name, schema in schemas for fault in _missing(name, schema, wanted)]
    if faults:
        return first, faults
    for name, schema in schemas[1:]:
        faults += _differences(first_name, first, name, schema, wanted, all_columns=columns is None)
    if faults:
        return first, faults
    fields = [_merged([schema.field(column) for _, schema in schemas]) for column in wanted]
    return pa.schema(fields, metadata=first.metadata), []


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of `schema`, in its order; copies nothing."""
    return pa.RecordBatch.from_arrays([batch.column(name) for name in schema.names], schema=schema)


def _merged(fields: Sequence[pa.Field]) -> pa.Field:
    first = fields[0]
    return first.with_nullable(any(field.nullable for field in fields))


def _missing(name: str, schema: pa.Schema, wanted: Sequence[str]) -> list[str]:
    known = schema.names
    faults = []
    for column in wanted:
        count = known.count(column)
        if count == 0:
            near = difflib.get_close_matches(column, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {_listed(known)}"
            faults.append(f"{name}: no column {column!r}; {hint}")
        elif count > 1:
            faults.append(f"{name}: {count} columns are named {column!r}")
    return faults


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "") if names else "no columns"


def _differences(
    first_name: str, first: pa.Schema, name: str, schema: pa.Schema, wanted: Sequence[str], *, all_columns: bool
) -> list[str]:
    faults = [
        f"{name}: column {column!r} is {schema.field(column).type}, but {first.field(column).type} in {first_name}"
        for column in wanted
        if not schema.field(column).type.equals(first.field(column).type)
    ]
    extra = [column for column in schema.names if column not in wanted] if all_columns else []
    if extra:
        faults.append(f"{name}: columns {_listed(extra)} are not in {first_name}; name `columns` to leave them out")
    return faults
