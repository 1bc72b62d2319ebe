"""Record batches as tensors."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
import torch

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed.collate import to_torch
from support.messages import refusal


def address(array: pa.Array) -> int:
    buffer = array.buffers()[-1]
    return buffer.address + array.offset * array.type.bit_width // 8


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
)
def test_numbers_share_memory_with_arrow(dtype):
    array = pa.array(np.arange(10).astype(dtype)).slice(3, 4)
    tensor = to_torch(pa.record_batch({"x": array}))["x"]
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.tolist() == [3, 4, 5, 6]
    assert tensor.data_ptr() == address(array)


def test_fixed_size_lists_become_tensors_of_more_dimensions_without_a_copy():
    values = pa.array(np.arange(24, dtype=np.float32))
    inner = pa.FixedSizeListArray.from_arrays(values, 3)
    array = pa.FixedSizeListArray.from_arrays(inner, 2).slice(1, 2)
    tensor = to_torch(pa.record_batch({"x": array}))["x"]
    assert torch.equal(tensor, torch.arange(24.0).view(4, 2, 3)[1:3])
    assert tensor.data_ptr() == values.buffers()[1].address + 6 * 4


def test_fixed_shape_tensors_keep_their_shape():
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype=np.int32).reshape(4, 2, 3))
    tensor = to_torch(pa.record_batch({"x": array.slice(1, 2)}))["x"]
    assert torch.equal(tensor, torch.arange(24, dtype=torch.int32).view(4, 2, 3)[1:3])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (pa.date32(), torch.int32),
        (pa.date64(), torch.int64),
        (pa.time32("s"), torch.int32),
        (pa.time64("us"), torch.int64),
        (pa.duration("ns"), torch.int64),
    ],
)
def test_times_and_dates_become_integers_of_their_own_width(kind, dtype):
    numbers = pa.array([0, 86_400_000], pa.int64() if dtype == torch.int64 else pa.int32())
    tensor = to_torch(pa.record_batch({"when": numbers.view(kind)}))["when"]
    assert (tensor.dtype, tensor.tolist()) == (dtype, [0, 86_400_000])


def test_booleans_and_times_become_tensors():
    when = pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("ms"))
    batch = to_torch(pa.record_batch({"flag": pa.array([True]), "when": when}))
    assert batch["flag"].dtype == torch.bool
    assert batch["flag"].tolist() == [True]
    assert batch["when"].tolist() == [1000]


def test_lists_of_varying_length_are_filled_up_with_zeros_and_their_lengths_are_told():
    array = pa.array([[9], [1, 2], [], [3]], pa.list_(pa.int64())).slice(1)
    batch = to_torch(pa.record_batch({"x": array, "s": pa.array([{"y": [1.5]}, {"y": []}, {"y": [2.5, 3.5]}])}))

    assert batch["x"].tolist() == [[1, 2], [0, 0], [3, 0]]
    assert batch["x_lengths"].tolist() == [2, 0, 1]
    assert batch["s"]["y"].tolist() == [[1.5, 0.0], [0.0, 0.0], [2.5, 3.5]]
    assert batch["s"]["y_lengths"].dtype == torch.int64

    equal = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64()))
    assert to_torch(pa.record_batch({"x": equal}))["x"].data_ptr() == equal.values.buffers()[1].address


def test_a_column_named_as_the_lengths_of_another_is_refused():
    with refusal(InputError):
        to_torch(pa.record_batch({"x": [[1], [2]], "x_lengths": [1, 2]}))


def test_structs_become_dictionaries_and_other_values_lists():
    point = pa.array([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": None}])
    batch = to_torch(pa.record_batch({"p": point, "d": pa.array(["u", "v"]).dictionary_encode()}))
    assert batch["p"]["x"].tolist() == [1.0, 2.0]
    assert batch["p"]["name"] == ["a", None]
    assert batch["d"] == ["u", "v"]


@pytest.mark.parametrize(
    "array", [pa.array([1, None]), pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), pa.array([[1, 2], None])]
)
def test_nulls_among_numbers_are_refused_with_the_columns_name(array):
    with refusal(InputError):
        to_torch(pa.record_batch({"x": array}))
