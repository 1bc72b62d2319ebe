"""Distances between values, and the order of differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from genlight.adapter.check.compare import Comparison
from genlight.adapter.check.snapshot import KINDS, Recording, Snapshot, compare_snapshots, describe, distance

pytestmark = pytest.mark.promise(name="equal")


def snapshot_of(**kinds):
    return Snapshot({kind: kinds.get(kind.replace(" ", "_"), {}) for kind in KINDS})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([0.0], [0.0], 0.0),
        ([0.0], [1e-30], math.inf),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [2.0, 1.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
        ([1 + 1j], [1 + 1j], 0.0),
    ],
)
def test_a_distance_is_relative_and_infinite_where_values_cannot_be_compared(a, b, expected):
    assert distance(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected)


def test_missing_value_is_infinitely_far():
    distances = compare_snapshots(snapshot_of(weight={"w": torch.ones(2)}), snapshot_of(weight={"v": torch.ones(2)}))

    assert distances["weight"] == {"w": math.inf, "v": math.inf}


def test_first_kind_that_differs_is_reported_although_a_later_one_differs_more():
    plain = snapshot_of(metric={"train/loss": torch.tensor(1.0)}, weight={"w": torch.tensor(1.0)})
    hosted = snapshot_of(metric={"train/loss": torch.tensor(1.1)}, weight={"w": torch.tensor(9.0)})

    with Recording() as recording:
        comparison = Comparison(recording, rtol=1e-3)
        comparison.take(3, plain, hosted)
    assert (comparison.first.kind, comparison.first.name) == ("metric", "train/loss")


def test_rounding_around_a_zero_gradient_is_a_difference_only_in_fp32():
    def state(noise):
        moments = {"state.opt[state.m.bias].exp_avg": noise, "state.opt[state.m.weight].exp_avg": torch.ones(3)}
        return snapshot_of(
            optimizer_state=moments, weight={"state.m.bias": 1e6 * noise, "state.m.weight": torch.ones(3)}
        )

    plain, hosted = state(torch.tensor([1e-9])), state(torch.tensor([-1e-9]))

    assert max(compare_snapshots(plain, hosted, exact=False)["weight"].values()) == 0
    assert compare_snapshots(plain, hosted, exact=True)["weight"]["state.m.bias"] > 1e-5


def test_description_of_a_tensor_is_shape_and_norm_and_of_a_number_its_value():
    assert describe(torch.tensor([[3.0, 4.0]])) == "1x2, norm 5"
    assert describe(torch.tensor(0.5)) == "0.5"
    assert describe(None) == "absent"
    assert describe(np.array(["a", None], object)) == "array(['a', None], dtype=object)"
    assert len(describe("a" * 1000)) == 100
