"""The comparison of two runs names rows before metrics, and metrics before the final state."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, strategies as st

from genlight.adapter.check.snapshot import flatten
from genlight.adapter.prove.evidence import Evidence, digest_of_batch, equal_metrics, first_difference

LOSS = frozenset({"train/loss"})


def evidence(rows=("a", "b"), losses=(1.0, 0.5), weight=1.0):
    return Evidence(
        rows={(step, 0): digest for step, digest in enumerate(rows, 1)},
        metrics={(step, "train/loss"): loss for step, loss in enumerate(losses, 1)},
        state=flatten({"weight": torch.tensor([weight])}, "state"),
        ranks=1,
        repeated=0,
    )


@pytest.mark.parametrize(
    ("changes", "words", "size"),
    [
        ({"rows": ("a", "c"), "losses": (1.0, 0.4), "weight": 2.0}, ["step 2", "rank 0", "rows"], math.inf),
        ({"rows": ("a",)}, ["step 2", "rows"], math.inf),
        ({"losses": (1.0, 0.4), "weight": 2.0}, ["train/loss of step 2", "0.4", "0.5"], 1.0),
        ({"losses": (1.0, math.nan)}, ["train/loss of step 2", "nan"], math.inf),
        ({"weight": 1.5}, ["weight"], 0.5),
    ],
)
def test_the_earliest_cause_is_named(changes, words, size):
    difference = first_difference(evidence(), evidence(**changes), LOSS)

    assert all(word in difference.text for word in words), difference.text
    assert difference.size == size


def test_equal_bits_and_metrics_of_clocks_make_no_difference():
    assert first_difference(evidence(losses=(1.0, math.nan)), evidence(losses=(1.0, math.nan)), LOSS) is None
    assert first_difference(evidence(), evidence(losses=(1.0, 0.4)), frozenset()) is None
    assert equal_metrics(evidence(), evidence(losses=(1.0, 0.4))) == frozenset()


BATCHES = [
    lambda n: torch.arange(4.0) * n,
    lambda n: {"x": [np.full(3, n)], "name": f"row {n}"},
    lambda n: pa.record_batch({"x": [1.0, n], "image": [b"a", bytes([n])]}),
    lambda n: pa.table({"x": [[n], []]}),
    lambda n: (n, None),
]


@pytest.mark.parametrize("make", BATCHES)
@given(st.integers(0, 200), st.integers(0, 200))
def test_two_batches_have_one_digest_if_their_rows_are_equal(make, a, b):
    assert (digest_of_batch(make(a)) == digest_of_batch(make(b))) == (a == b)
