"""Replay buffers whose columns are Arrow's: schemas, record batches in and out, checkpoints, and what is refused."""

from __future__ import annotations

import datetime
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from genlight.adapter.contract.exceptions import BrokenCheckpointError, ReplayWriterError
from genlight.adapter.feed import NStep, ReplayBuffer, ReplayFeed
from genlight.adapter.feed.replay_arrow import rows_of

SCHEMA = pa.schema(
    [
        pa.field("observation", pa.list_(pa.float32(), 3), metadata={"unit": "m"}),
        pa.field("image", pa.fixed_shape_tensor(pa.uint8(), (2, 2))),
        ("action", pa.int16()),
        pa.field("reward", pa.float64(), nullable=False),
        ("terminated", pa.bool_()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
        ("name", pa.binary(4)),
        ("grid", pa.list_(pa.list_(pa.uint32(), 2), 3)),
    ],
    metadata={"origin": "a simulator"},
)


def rows(first: int, count: int) -> pa.RecordBatch:
    """Rows whose values are made of their numbers."""
    number = np.arange(first, first + count)
    images = np.stack([np.full((2, 2), n % 251, np.uint8) for n in number])
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(number, 3).astype(np.float32)), 3),
        pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        pa.array(number.astype(np.int16)),
        pa.array(number.astype(np.float64)),
        pa.array(number % 5 == 4),
        pa.array([datetime.datetime.fromtimestamp(int(n), datetime.UTC) for n in number], SCHEMA.field("at").type),
        pa.array(number.astype(np.int32)).view(pa.date32()),
        pa.array([b"%04d" % n for n in number], pa.binary(4)),
        pa.array([[[n, n + 1]] * 3 for n in number.tolist()], SCHEMA.field("grid").type),
    ]
    return pa.record_batch(columns, schema=SCHEMA)


@pytest.fixture(params=["memory", "mapped"])
def directory(request, tmp_path):
    """Where columns are: in memory, or in files."""
    return tmp_path / "columns" if request.param == "mapped" else None


def test_record_batches_come_out_as_they_went_in(directory):
    """Every type, around the end of the ring, from slices too, with names, metadata and the numbers of the rows."""
    buffer = ReplayBuffer(10, SCHEMA, directory=directory)
    written = rows(0, 40)
    for first in range(0, 40, 8):
        buffer.extend(written.slice(first, 8))
    drawn = buffer.sample_arrow(10)
    index = drawn.column("index").to_pylist()
    assert drawn.select(SCHEMA.names).equals(written.take(index), check_metadata=True)
    assert set(index) <= set(range(30, 40))
    buffer.close()


def test_tensors_and_record_batches_are_two_views_of_the_same_draw():
    """With sums over steps, priorities, and tensors as rows."""

    def made() -> ReplayBuffer:
        n_step = NStep(2, 0.5, following=("observation",), ends=("terminated",))
        return ReplayBuffer(100, SCHEMA, seed=3, n_step=n_step, priority_exponent=0.6)

    tensors, arrow = made(), made()
    arrow.extend(rows(0, 50))
    tensors.extend(rows_of(rows(0, 50), SCHEMA))
    expected, drawn = tensors.sample(16), arrow.sample_arrow(16)
    assert drawn.column("reward").to_pylist() == expected["reward"].tolist()
    assert drawn.column("steps").to_pylist() == expected["steps"].tolist()
    assert drawn.column("weight").to_pylist() == expected["weight"].tolist()
    assert drawn.column("grid").to_pylist() == expected["grid"].tolist()
    assert drawn.schema.field("index").type == pa.int64()


def test_a_buffer_of_tensors_gives_and_takes_record_batches():
    """Of the types that its tensors suggest."""
    buffer = ReplayBuffer(8, {"x": torch.zeros(2, 3), "y": torch.tensor(0, dtype=torch.int8)})
    x = torch.arange(24.0).reshape(4, 2, 3)
    buffer.extend({"x": x, "y": torch.arange(4, dtype=torch.int8)})
    drawn = buffer.sample_arrow(4)
    assert drawn.schema.field("x").type == pa.list_(pa.list_(pa.float32(), 3), 2)
    assert drawn.column("x").to_pylist() == x[drawn.column("index").to_pylist()].tolist()
    buffer.extend(drawn.select(["x", "y"]))
    assert buffer.written == 8
    with pytest.raises(ValueError, match=r"column 'x' is of torch.float32, not of torch.float64"):
        buffer.extend(pa.record_batch({"x": pa.array([[[0.0] * 3] * 2], pa.list_(pa.list_(pa.float64(), 3), 2)),
                                       "y": pa.array([1], pa.int8())}))  # fmt: skip


def test_memory_is_shared_on_the_way_in_and_out():
    """What is written is copied once, into the columns; what is drawn, not again."""
    batch = rows(0, 6)
    shared = rows_of(batch, SCHEMA)
    assert shared["reward"].data_ptr() == batch.column("reward").buffers()[1].address
    assert shared["name"].data_ptr() == batch.column("name").buffers()[1].address
    assert shared["grid"].data_ptr() == batch.column("grid").flatten().flatten().buffers()[1].address
    sliced = rows_of(batch.slice(2, 3), SCHEMA)
    assert sliced["name"].data_ptr() == batch.column("name").buffers()[1].address + 8
    assert bytes(sliced["name"][0].tolist()) == b"0002"


def test_a_load_goes_on_with_the_same_draws_from_incremental_saves(directory, tmp_path):
    """The rows of an earlier save are linked."""

    def made(directory=None) -> ReplayBuffer:
        return ReplayBuffer(64, SCHEMA, seed=1, priority_exponent=0.6, directory=directory)

    buffer = made(directory)
    buffer.extend(rows(0, 40))
    buffer.save(tmp_path / "a")
    buffer.extend(rows(40, 4))
    buffer.save(tmp_path / "b")
    assert len([path for path in (tmp_path / "b").glob("rows-*") if path.stat().st_nlink == 2]) == 1
    again = made()
    again.load(tmp_path / "b")
    for _ in range(3):
        assert again.sample_arrow(9).equals(buffer.sample_arrow(9), check_metadata=True)
    buffer.close()


def test_a_damaged_save_is_refused_and_so_is_one_of_other_types(tmp_path):
    """Of a column that has the same bytes, but another meaning."""
    buffer = ReplayBuffer(64, SCHEMA)
    buffer.extend(rows(0, 40))
    buffer.save(tmp_path)
    other = SCHEMA.set(5, pa.field("at", pa.timestamp("ms", tz="UTC")))
    with pytest.raises(ValueError, match=r"the replay buffer in .* has arrow .*timestamp\[us, tz=UTC\]"):
        ReplayBuffer(64, other).load(tmp_path)
    (path,) = tmp_path.glob("rows-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpointError, match=path.name):
        ReplayBuffer(64, SCHEMA).load(tmp_path)


def test_columns_without_a_fixed_size_are_refused_by_name():
    """All of them at once."""
    schema = pa.schema([("x", pa.int8()), ("text", pa.string()), ("items", pa.list_(pa.int8())), ("x", pa.int8())])
    with pytest.raises(
        ValueError,
        match=r"there are 2 columns named 'x'; column 'text' is of string; column 'items' is of list<item: int8>. "
        "Columns are allocated once",
    ):
        ReplayBuffer(4, schema)


def test_record_batches_that_do_not_fit_change_nothing():
    """Types, nulls, names and numbers of rows; every fault is told."""
    schema = pa.schema([("x", pa.int32()), ("y", pa.list_(pa.float32(), 2)), ("z", pa.binary(2)), ("w", pa.int8())])
    buffer = ReplayBuffer(4, schema)
    bad = pa.record_batch(
        {
            "x": pa.array([1, 2], pa.int64()),
            "y": pa.array([[1.0, None], [1.0, 2.0]], pa.list_(pa.float32(), 2)),
            "z": pa.array([b"ab", None], pa.binary(2)),
            "more": pa.array(["a", "b"]),
        }
    )
    with pytest.raises(ValueError, match=r"ReplayBuffer\.extend") as caught:
        buffer.extend(bad)
    for fault in (
        "there is no column 'more'",
        "column 'w' is missing",
        "column 'x' is of int32, not of int64",
        "Column 'y' has 1 nulls",
        "Column 'z' has 1 nulls",
    ):
        assert fault in str(caught.value)
    good = pa.record_batch(
        [pa.array([1] * 5, pa.int32()), pa.array([[1.0, 2.0]] * 5, schema.field("y").type),
         pa.array([b"ab"] * 5, pa.binary(2)), pa.array([1] * 5, pa.int8())], schema=schema
    )  # fmt: skip
    with pytest.raises(ValueError, match="expected from 1 to 4 rows, but received 5"):
        buffer.extend(good)
    with pytest.raises(ValueError, match="expected from 1 to 4 rows, but received 0"):
        buffer.extend(good.slice(0, 0))
    assert buffer.written == 0


def test_a_dtype_that_arrow_does_not_have_is_told():
    """Where rows are drawn as record batches."""
    buffer = ReplayBuffer(4, {"x": torch.tensor(0.0, dtype=torch.bfloat16)})
    buffer.extend({"x": torch.ones(2, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"column 'x' is of torch.bfloat16, which Arrow does not have"):
        buffer.sample_arrow(2)


def test_a_feed_gives_record_batches_and_a_second_writer_is_refused():
    """As files of data do, so that a class takes its batches from either."""
    buffer = ReplayBuffer(64, SCHEMA)
    buffer.extend(rows(0, 32))
    batches = list(ReplayFeed(buffer, 8, batches=3, arrow=True))
    assert [batch.num_rows for batch in batches] == [8, 8, 8]
    assert all(isinstance(batch, pa.RecordBatch) for batch in batches)
    errors: list[Exception] = []

    def write() -> None:
        try:
            buffer.extend(rows(32, 4))
        except ReplayWriterError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert buffer.written == 32
