"""How far two values are apart, and which difference stands first."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from genlight.adapter.check.batches import joined
from genlight.adapter.check.snapshot import KINDS, Snapshot, compare_snapshots, described, distance
from genlight.adapter.contract.exceptions import ContractError


def reached(**kinds):
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


def test_a_value_that_one_side_lacks_is_infinitely_far():
    found = compare_snapshots(1, reached(weight={"w": torch.ones(2)}), reached(weight={"v": torch.ones(2)}))

    assert found.distances["weight"] == {"w": math.inf, "v": math.inf}
    assert found.beyond(1e9) == ("weight", "w", math.inf)


def test_the_first_kind_that_differs_is_named_though_a_later_one_differs_more():
    plain = reached(metric={"train/loss": torch.tensor(1.0)}, weight={"w": torch.tensor(1.0)})
    hosted = reached(metric={"train/loss": torch.tensor(1.1)}, weight={"w": torch.tensor(9.0)})

    assert compare_snapshots(3, plain, hosted).beyond(1e-3)[:2] == ("metric", "train/loss")


def test_rounding_of_a_gradient_that_is_zero_is_no_difference_on_several_ranks_and_is_one_on_a_single_rank():
    def state(noise):
        moments = {"state.opt[state.m.bias].exp_avg": noise, "state.opt[state.m.weight].exp_avg": torch.ones(3)}
        return reached(optimizer_state=moments, weight={"state.m.bias": 1e6 * noise, "state.m.weight": torch.ones(3)})

    plain, hosted = state(torch.tensor([1e-9])), state(torch.tensor([-1e-9]))

    assert compare_snapshots(1, plain, hosted, exact=False).beyond(1e-5) is None
    assert compare_snapshots(1, plain, hosted, exact=True).beyond(1e-5)[:2] == ("weight", "state.m.bias")


def test_tensors_are_told_by_shape_and_norm_and_numbers_as_they_are():
    assert described(torch.tensor([[3.0, 4.0]])) == "1x2, norm 5"
    assert described(torch.tensor(0.5)) == "0.5"
    assert described(None) == "absent"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[[1], [2]], [[3]]], [[1], [2], [3]]),
        ([{"x": [1]}, {"x": [2]}], {"x": [1, 2]}),
        ([{"x": {"y": [1]}}, {"x": {"y": [2]}}], {"x": {"y": [1, 2]}}),
        ([7], 7),
    ],
)
def test_rows_of_all_ranks_are_put_together_in_the_order_of_ranks(given, expected):
    assert joined(given) == expected


def test_arrays_tensors_and_arrow_data_are_put_together_too():
    assert torch.equal(joined([torch.ones(1, 2), torch.zeros(1, 2)]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert joined([np.ones(2), np.zeros(1)]).tolist() == [1.0, 1.0, 0.0]
    arrow = joined([pa.record_batch({"x": [1, 2]}), pa.record_batch({"x": [3]})])
    assert isinstance(arrow, pa.RecordBatch)
    assert arrow.to_pydict() == {"x": [1, 2, 3]}
    assert joined([pa.table({"x": [1]}), pa.table({"x": [2]})]).to_pydict() == {"x": [1, 2]}


def test_batches_without_rows_are_refused_on_several_ranks_with_the_way_out():
    with pytest.raises(ContractError, match=r"of type int, which cannot be put together.*lightning.devices=1"):
        joined([1, 2])
