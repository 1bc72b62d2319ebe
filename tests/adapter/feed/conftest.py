"""Data sets and readers that the feed tests share."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def write_rows(path: Path, groups: Iterable[int], *, first_id: int = 0) -> Path:
    """A Parquet file with one row group for each count, and a column ``id`` that numbers the rows."""
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups:
            ids = np.arange(first_id, first_id + rows)
            texts = [f"row {i}" for i in ids]
            writer.write_batch(pa.record_batch([pa.array(ids), pa.array(texts, pa.string())], schema=schema))
            first_id += rows
    return path


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Path]:
    """Makes ``<name>.parquet`` with the given rows per row group."""

    def make(*groups: int, name: str = "data", first_id: int = 0) -> Path:
        return write_rows(tmp_path / f"{name}.parquet", groups, first_id=first_id)

    return make


@pytest.fixture
def ids() -> Callable[..., list[list[int]]]:
    """The ``id`` column of each batch of a feed, of all of them or of the first few."""

    def read(batches: Iterable[Any], steps: int | None = None) -> list[list[int]]:
        iterator: Iterator[Any] = iter(batches)
        return [batch.column("id").to_pylist() for batch in itertools.islice(iterator, steps)]

    return read
