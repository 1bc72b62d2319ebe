"""Where batches can come from: files of several kinds and places, tables, data sets."""

import itertools
import subprocess
import sys

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter import ArrowFeed
from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed import batching
from genlight.adapter.feed.files import expand
from support.messages import refusal


def all_ids(source, **options):
    return [i for b in ArrowFeed(source, epochs=1, batch_size=2, **options) for i in b.column("id").to_pylist()]


def test_files_folders_and_patterns_are_read_in_sorted_order(rows_file, tmp_path):
    rows_file(2, name="b", first_id=2)
    rows_file(2, name="a")
    (tmp_path / "notes.txt").write_text("not data")
    assert all_ids(tmp_path) == all_ids(str(tmp_path / "*.parquet")) == [0, 1, 2, 3]
    assert all_ids([tmp_path / "b.parquet", str(tmp_path / "a.parquet")]) == [2, 3, 0, 1]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(rows_file):
    assert all_ids(rows_file(2, name="part[1]")) == [0, 1]


def test_any_fsspec_file_system_can_hold_the_files(rows_file):
    memory = fsspec.filesystem("memory")
    memory.makedirs("/feed", exist_ok=True)
    for name in ("a", "b"):
        memory.pipe_file(f"/feed/{name}.parquet", rows_file(3, name=name).read_bytes())
    try:
        assert all_ids("memory://feed/a.parquet") == [0, 1, 2]
        assert all_ids("memory://feed") == all_ids("memory://feed/*.parquet") == [0, 1, 2] * 2
        assert all_ids("/feed/b.parquet", filesystem=memory) == [0, 1, 2]
        with refusal(InputError):
            all_ids("memory://feed/c.parquet")
    finally:
        memory.rm("/feed", recursive=True)


def test_an_unknown_scheme_is_an_input_error():
    with refusal(InputError):
        expand("nonsense://bucket/data.parquet")


def test_tables_and_record_batches_are_handed_out_without_a_copy():
    table = pa.table({"id": np.arange(6)})
    batches = list(ArrowFeed(table, batch_size=3, epochs=1))
    assert batches[1].column("id").buffers()[1].address == table.column("id").chunk(0).buffers()[1].address
    assert all_ids(table.to_batches()) == list(range(6))
    assert all_ids([table, table]) == [*range(6), *range(6)]


def values(kind: pa.DataType) -> st.SearchStrategy:
    if pa.types.is_dictionary(kind):
        return st.sampled_from(["red", "green", "blue"])
    if pa.types.is_string(kind):
        return st.text(max_size=5)
    if pa.types.is_binary(kind):
        return st.binary(max_size=5)
    if pa.types.is_list(kind):
        return st.lists(values(kind.value_type) | st.none(), max_size=3)
    if pa.types.is_fixed_size_list(kind):
        return st.lists(values(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({kind.field(i).name: values(kind.field(i).type) for i in range(kind.num_fields)})
    if pa.types.is_boolean(kind):
        return st.booleans()
    return st.integers(-100, 100)


KINDS = {
    "number": pa.int32(),
    "flag": pa.bool_(),
    "text": pa.string(),
    "blob": pa.binary(),
    "colour": pa.dictionary(pa.int32(), pa.string()),
    "items": pa.list_(pa.int16()),
    "vector": pa.list_(pa.int32(), 2),
    "nested": pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]),
}


@settings(max_examples=40)
@given(st.data())
def test_every_value_of_every_type_arrives_whatever_the_row_groups(tmp_path_factory, data):
    name = data.draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name]
    groups = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any))
    rows = data.draw(st.lists(values(kind) | st.none(), min_size=sum(groups), max_size=sum(groups)))
    batch_size, shuffle = data.draw(st.integers(1, 6)), data.draw(st.booleans())
    chunk_bytes = data.draw(st.sampled_from([1, 64, 1 << 20]))
    path = tmp_path_factory.mktemp("layout") / "data.parquet"
    schema = pa.schema([("place", pa.int64()), (name, kind)])
    with pq.ParquetWriter(path, schema) as writer:
        start = 0
        for count in groups:
            columns = [pa.array(range(start, start + count)), pa.array(rows[start : start + count], kind)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            start += count
    feed = ArrowFeed(path, batch_size=batch_size, epochs=1, shuffle=shuffle, shuffle_window=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "CHUNK_BYTES", chunk_bytes)
        batches = list(feed)
    assert all(batch.schema.equals(schema) for batch in batches)
    assert [batch.num_rows for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    seen = pa.Table.from_batches(batches).to_pylist()
    assert sorted(row["place"] for row in seen) == list(range(len(rows)))
    assert all(row[name] == rows[row["place"]] for row in seen)


def test_importing_the_package_loads_neither_torch_nor_lightning_nor_arrow():
    code = (
        "import sys, genlight.adapter as feed; heavy = {'torch', 'lightning', 'pyarrow'}; "
        "assert not heavy & set(sys.modules); feed.ArrowFeed, feed.ParquetArrowBatchFeeder; "
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ENCODED = {
    "string_view": pa.array([f"text {i}" for i in range(20)]).cast(pa.string_view()),
    "binary_view": pa.array([b"%d" % i for i in range(20)]).cast(pa.binary_view()),
    "run_end_encoded": pc.run_end_encode(pa.array([i // 3 for i in range(20)])),
    "list_view": pa.array([[i] * (i % 3) for i in range(20)], pa.list_view(pa.int64())),
    "union": pa.UnionArray.from_sparse(pa.array([0] * 20, pa.int8()), [pa.array(range(20))]),
}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_window": 3}])
def test_columns_in_encodings_that_arrow_cannot_reorder_are_handed_out_all_the_same(encoding, options):
    column = ENCODED[encoding]
    table = pa.table({"id": range(20), "column": column})
    rows = [row for batch in ArrowFeed(table, batch_size=6, epochs=1, **options) for row in batch.to_pylist()]
    assert sorted((row["id"], row["column"]) for row in rows) == [(i, column[i].as_py()) for i in range(20)]


class DataFrame:
    """What pandas, polars and others have in common."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def words(prefix: str, count: int, index: pa.DataType) -> pa.Array:
    return pa.array([f"{prefix}{i}" for i in range(count)]).dictionary_encode().cast(pa.dictionary(index, pa.string()))


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ([pa.nulls(2), pa.array(["a", None])], pa.string()),
        ([pa.array([1.0]), pa.nulls(1), pa.array([2.0])], pa.float64()),
        ([pa.array(["a"]), pa.array(["b"], pa.large_string())], pa.large_string()),
        ([pa.array([[None]]), pa.array([[2, 3]], pa.large_list(pa.int32()))], pa.large_list(pa.int32())),
        ([pa.array([{"a": None}]), pa.array([{"a": "x"}])], pa.struct({"a": pa.string()})),
        ([words("a", 100, pa.int8()), words("b", 100, pa.int8())], pa.dictionary(pa.int32(), pa.string())),
        ([words("a", 9, pa.int8()), words("b", 9, pa.int64())], pa.dictionary(pa.int64(), pa.string())),
        ([words("a", 3, pa.int8()), pa.array(["x"]), pa.nulls(2)], pa.string()),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_types_that_writers_choose_by_the_values_of_a_file_are_widened(columns, kind, shuffle, tmp_path):
    for number, column in enumerate(columns):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{number}.parquet")
    expected = [value for column in columns for value in column.to_pylist()]
    feed = ArrowFeed(tmp_path, batch_size=7, epochs=1, shuffle=shuffle)
    found = [value for batch in feed for value in batch.column("x").to_pylist()]
    assert feed.schema.field("x").type == kind
    assert found == expected if not shuffle else sorted(map(repr, found)) == sorted(map(repr, expected))
    assert ArrowFeed([pa.table({"x": column}) for column in columns]).schema == feed.schema


@pytest.mark.parametrize(("one", "other"), [(pa.int32(), pa.int64()), (pa.timestamp("us"), pa.timestamp("ns"))])
def test_types_that_may_lose_values_or_change_batches_are_refused_with_the_way_out(one, other, tmp_path):
    for kind in (one, other):
        pq.write_table(pa.table({"x": pa.array([1], kind), "y": [1]}), tmp_path / f"{kind}.parquet")
    with refusal(InputError):
        ArrowFeed(tmp_path).check()
    ArrowFeed(tmp_path, columns=["y"]).check()


def test_a_column_that_is_only_in_the_name_of_a_folder_is_explained(rows_file, tmp_path):
    (tmp_path / "year=2024").mkdir()
    rows_file(3, name="year=2024/part-0")
    with refusal(InputError):
        ArrowFeed(tmp_path, columns=["id", "year"]).check()


def test_a_data_frame_is_read_like_a_table():
    assert all_ids(DataFrame(pa.table({"id": range(5)}))) == list(range(5))


@pytest.mark.parametrize(
    "source", [None, 3, b"data.parquet", {"id": [1]}, [["a.parquet"]], [pa.table({"id": [1]}), "a"]]
)
def test_what_is_no_source_is_a_type_error_that_says_what_is(source):
    with refusal(TypeError):
        ArrowFeed(source).check()


def test_an_endless_stream_of_rows_is_refused_at_its_first_row():
    with refusal(TypeError):
        ArrowFeed({"id": i} for i in itertools.count()).check()
