"""The digest of a batch is the same for the same rows, and another one if any row is another."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash

from genlight.callbacks.witness.recording import _parts

pytestmark = pytest.mark.promise(name="resume")

Pair = namedtuple("Pair", "x y")


@dataclass
class Fields:
    x: Any
    name: str = "batch"


def numbers(row: int, shape: tuple[int, ...] = (64, 3)) -> torch.Tensor:
    """The same values for each `row` except in that row."""
    values = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    values[row % shape[0]] += 0.5
    return values


BATCHES = {
    "tensor": numbers,
    "large tensor": lambda row: numbers(row, (64, 3, 32, 32)),
    "large channels last": lambda row: numbers(row, (64, 3, 32, 32)).to(memory_format=torch.channels_last),
    "bfloat16": lambda row: (numbers(row) > 100).bfloat16() + row,
    "dictionary": lambda row: {"x": numbers(row), "y": torch.arange(4)},
    "named tuple": lambda row: Pair(numbers(row), 1),
    "object": lambda row: Fields(numbers(row)),
    "array": lambda row: numbers(row, (64, 3, 32, 32)).numpy(),
    "texts": lambda row: {"text": [f"sentence {n + (n == row)}" for n in range(32)]},
    "record batch": lambda row: pa.record_batch({"x": numbers(row)[:, 0].numpy(), "y": list(range(64))}),
    "table of lists": lambda row: pa.table({"x": numbers(row).numpy().tolist()}),
    "table of texts": lambda row: pa.table({"x": [f"sentence {n + (n == row)}" for n in range(32)]}),
    "missing values": lambda row: pa.table({"x": [None if n == row else n for n in range(32)]}),
    "sliced table": lambda row: pa.table({"x": numbers(row, (200, 1))[:, 0].numpy()}).slice(row, 64),
    "list of arrow rows": lambda row: [{"id": n + 100 * (n == row)} for n in range(20)],
}


def digest(batch: Any) -> int:
    hasher = xxhash.xxh3_64()
    for part in _parts(batch):
        assert isinstance(part, bytes)
        hasher.update(part)
    return hasher.intdigest()


@pytest.mark.parametrize("kind", BATCHES)
def test_other_rows_have_another_digest(kind):
    make = BATCHES[kind]
    assert digest(make(3)) == digest(make(3))
    assert len({digest(make(row)) for row in (0, 3, 7, 13)}) == 4


def test_a_batch_without_values_and_any_object_have_a_digest():
    for batch in (
        None,
        [],
        {},
        object(),
        torch.empty(0, 4),
        np.array([object()]),
        torch.eye(3).to_sparse(),
        print,
        int,
    ):
        digest(batch)
