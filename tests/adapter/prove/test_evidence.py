"""The comparison of two runs names a step and its cause before the final state."""

from __future__ import annotations

import math

import pytest
import torch

from genlight.adapter.prove.evidence import Evidence, first_difference
from genlight.callbacks.witness.entry import Entry, Header, Recorded


def evidence(rows=(1, 2), losses=(1.0, 0.5), weight=1.0, random=(0,) * 6):
    entries = [
        Entry(step, 0, step - 1, 1, of_step, random, rates=3, losses=hash(loss) % 2**60, rate=0.1, loss=loss)
        for step, (of_step, loss) in enumerate(zip(rows, losses, strict=False), 1)
    ]
    return Evidence(
        witness={0: Recorded(Header("run", 0), {entry.key: entry for entry in entries})},
        state={"weight": torch.tensor([weight]), "count": 3},
        repeated=0,
    )


@pytest.mark.parametrize(
    ("changes", "words", "size"),
    [
        ({"rows": (1, 3), "losses": (1.0, 0.4), "weight": 2.0}, ["step 2", "rank 0", "rows"], math.inf),
        ({"losses": (1.0, 0.4), "weight": 2.0}, ["step 2", "loss", "0.4", "0.5"], 1.0),
        ({"random": (0, 1, 0, 0, 0, 0), "weight": 1.5}, ["step 1", "NumPy"], math.inf),
        ({"weight": 1.5}, ["at the end", "weight"], 0.5),
    ],
)
def test_the_earliest_cause_is_named(changes, words, size):
    text, found = first_difference(evidence(), evidence(**changes))

    assert all(word in text for word in words), text
    assert found == size


def test_equal_runs_have_no_difference_and_one_digest():
    first, second, other = evidence(), evidence(), evidence(weight=2.0)

    assert first_difference(first, second) is None
    assert first.digest == second.digest != other.digest
