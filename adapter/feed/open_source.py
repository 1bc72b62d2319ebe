"""From what a user has to what a feed reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ..contract.exceptions import InputError
from .files import DataFile, expand
from .parquet_source import ParquetSource
from .sources import Source, TableSource, input_error

__all__ = ["open_source"]

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
