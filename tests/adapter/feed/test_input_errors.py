"""Bad input: one clear error, before training where metadata can tell, else at the step that needed the rows."""

import errno
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from genlight.adapter import ArrowFeed
from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed import batching
from support.messages import refusal


def spoil_row_group(path: Path, group: int) -> None:
    """Overwrite the data pages of one row group, and leave size, footer and modification time as they are."""
    stat = path.stat()
    column = pq.read_metadata(path).row_group(group).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * column.total_compressed_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-20])
    return path


def write(path: Path, *columns: object) -> Path:
    pq.write_table(pa.Table.from_arrays([pa.array([each]) for each in columns], ["id", "text"]), path)
    return path


UNUSABLE = {
    "missing": lambda make, folder: ArrowFeed(folder / "nowhere.parquet"),
    "no paths": lambda make, folder: ArrowFeed([]),
    "empty folder": lambda make, folder: ArrowFeed(folder),
    "no match": lambda make, folder: ArrowFeed(str(folder / "*.parquet")),
    "similar column": lambda make, folder: ArrowFeed(make(3), columns=["id", "txet"]),
    "unknown column": lambda make, folder: ArrowFeed(make(3), columns=["zzz"]),
    "two types": lambda make, folder: ArrowFeed([make(3), write(folder / "other.parquet", "a", "b")]),
    "two columns of one name": lambda make, folder: ArrowFeed(pa.Table.from_arrays([[1], [2]], names=["a", "a"])),
    "truncated": lambda make, folder: ArrowFeed(truncate(make(50))),
    "no rows": lambda make, folder: ArrowFeed(make(0)),
    "fewer rows than ranks": lambda make, folder: ArrowFeed(make(3), world_size=4),
    "no full step": lambda make, folder: ArrowFeed(make(7), batch_size=4, world_size=2, drop_last=True),
}


@pytest.mark.parametrize("data", UNUSABLE)
def test_data_that_cannot_be_used_is_refused_by_name(rows_file, tmp_path, data):
    feed = UNUSABLE[data](rows_file, tmp_path)
    with refusal(InputError):
        feed.check()


def test_a_column_that_only_one_file_has_is_a_fault_unless_columns_leave_it_out(rows_file, tmp_path, ids):
    first = rows_file(3)
    pq.write_table(pa.table({"text": ["b"], "id": [3], "more": [1]}), tmp_path / "other.parquet")
    with refusal(InputError):
        ArrowFeed([first, tmp_path / "other.parquet"]).check()
    feed = ArrowFeed([first, tmp_path / "other.parquet"], columns=["text", "id"], batch_size=4, epochs=1)
    assert ids(feed) == [[0, 1, 2, 3]]
    assert feed.schema.names == ["text", "id"]


def test_what_is_no_regular_file_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as unreadable:
        unreadable.bind("data.parquet")
        with refusal(InputError):
            ArrowFeed("data.parquet").check()


def test_all_faults_are_listed_in_one_error(rows_file, tmp_path):
    short = rows_file(9, name="short")
    short.write_bytes(short.read_bytes()[:-5])
    with pytest.raises(InputError) as caught:
        ArrowFeed([rows_file(3), short, tmp_path / "gone.parquet"], columns=["di"]).check()
    for fault in ("short.parquet", "gone.parquet", "no column 'di'"):
        assert fault in str(caught.value)


@pytest.mark.parametrize("readahead", [0, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_row_group_fails_at_the_step_that_needs_it_and_is_named(rows_file, ids, readahead, workers):
    path = rows_file(8, 8, 8)
    spoil_row_group(path, 1)
    iterator = iter(ArrowFeed(path, batch_size=4, readahead=readahead, workers=workers))
    assert ids(iterator, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with refusal(InputError):
        next(iterator)


def test_the_position_after_a_failed_read_is_that_of_the_last_batch_handed_out(rows_file, ids):
    path = rows_file(8, 8)
    whole = path.read_bytes()
    spoil_row_group(path, 1)
    stat = path.stat()
    feed = ArrowFeed(path, batch_size=4, epochs=1)
    with pytest.raises(InputError):
        ids(feed)
    state = feed.state_dict()
    path.write_bytes(whole)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = ArrowFeed(path, batch_size=4, epochs=1)
    again.load_state_dict(state)
    assert ids(again) == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_file_that_changes_while_it_is_read_is_noticed(rows_file, ids):
    path = rows_file(8, 8)
    feed = ArrowFeed(path, batch_size=4, readahead=0, shuffle=True)
    feed.check()
    rows_file(8, 9)
    with refusal(InputError):
        ids(feed, 4)


def test_a_position_is_refused_on_other_data(rows_file):
    state = ArrowFeed(rows_file(8, 8)).state_dict()
    for groups in ((8, 9), (8, 8, 8), (7, 9)):
        with refusal(InputError):
            ArrowFeed(rows_file(*groups)).load_state_dict(state)


def test_a_position_survives_a_move_of_the_data(rows_file, tmp_path, ids):
    path = rows_file(8, 8)
    feed = ArrowFeed(path, batch_size=4, epochs=1)
    assert len(ids(feed, 1)) == 1
    state = feed.state_dict()
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved" / path.name)
    again = ArrowFeed(moved, batch_size=4, epochs=1)
    again.load_state_dict(state)
    assert ids(again, 1) == [[4, 5, 6, 7]]


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}, {"shuffle_window": 3}])
def test_a_position_is_refused_under_another_order(rows_file, change):
    path = rows_file(8, 8)
    options = {"shuffle": True, "shuffle_window": 4}
    state = ArrowFeed(path, **options).state_dict()
    with refusal(InputError):
        ArrowFeed(path, **{**options, **change}).load_state_dict(state)


BAD = [("batch_size", 0), ("batch_size", 1.5), ("readahead", -1), ("seed", -1), ("epochs", 0), ("rank", 1)]


@pytest.mark.parametrize(
    ("argument", "value"),
    [*BAD, ("shard", "files"), ("collate", "numpy"), ("workers", -1), ("shuffle_window", 0), ("columns", "id")],
)
def test_an_argument_out_of_range_is_refused_by_name(argument, value):
    with pytest.raises((ValueError, TypeError), match=f"Invalid `{argument}`"):
        ArrowFeed("data.parquet", **{argument: value})


@pytest.mark.parametrize("columns", [[], ["id", "id"], [3]])
def test_columns_that_cannot_be_meant_are_refused(columns):
    with refusal(ValueError):
        ArrowFeed("data.parquet", columns=columns)


def test_a_file_that_goes_away_while_it_is_read_is_named_with_the_row_group(rows_file, ids, monkeypatch):
    path = rows_file(*[50_000] * 3)
    monkeypatch.setattr(batching, "CHUNK_BYTES", 1)
    batches = iter(ArrowFeed(path, batch_size=50_000, epochs=1, readahead=0))
    assert len(ids(batches, 1)) == 1
    path.unlink()
    with refusal(InputError):
        list(batches)


def test_checksums_that_a_file_has_are_compared(tmp_path):
    path = tmp_path / "data.parquet"
    values = list(range(1000, 2000))
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"id": pa.array(values, pa.int64())}), path, **options)
    data, value = path.read_bytes(), (1777).to_bytes(8, "little")
    assert data.count(value) == 1
    path.write_bytes(data.replace(value, (1776).to_bytes(8, "little")))
    with refusal(InputError):
        list(ArrowFeed(path, epochs=1))


@pytest.mark.parametrize(
    "damage",
    [
        {"position": {"spans": "x"}},
        {"position": {"spans": [[0, 0, 10**9]]}},
        {"position": {"spans": [[0, 5, 1]]}},
        {"position": {"step": -5}},
        {"position": {"step": "a"}},
        {"position": {"step": None}},
        {"share": {"world_size": 0}},
        {"share": {"batch_size": 0}},
        {"share": {"shard": "columns"}},
    ],
)
def test_a_damaged_position_is_an_input_error(rows_file, damage):
    path = rows_file(8)
    state = ArrowFeed(path).state_dict()
    state |= {part: {**state[part], **values} for part, values in damage.items()}
    with refusal(InputError):
        ArrowFeed(path).load_state_dict(state)


class Failing(MemoryFileSystem):
    """A store whose client has an exception of its own, raised once reading has begun."""

    cachable = False
    error: Exception | None = None

    def _open(self, path, mode="rb", **options):
        if self.error is not None:
            raise self.error
        return super()._open(path, mode, **options)


def test_what_a_remote_file_system_raises_while_it_is_read_names_file_and_row_group(rows_file):
    store = Failing()
    store.pipe_file("/failing/data.parquet", rows_file(5).read_bytes())
    try:
        feed = ArrowFeed("/failing/data.parquet", filesystem=store, epochs=1)
        feed.check()
        for error in (LookupError("the store is gone"), PermissionError(errno.EACCES, os.strerror(errno.EACCES))):
            store.error = error
            for use in (lambda: list(feed), ArrowFeed("/failing/data.parquet", filesystem=store).check):
                with refusal(InputError):
                    use()
    finally:
        store.rm("/failing", recursive=True)


def test_of_very_many_faults_the_first_are_listed_and_the_others_counted(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.parquet").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        ArrowFeed(tmp_path).check()
    lines = str(caught.value).splitlines()
    assert len(lines) == 42
    assert "039.parquet" in lines[-2]
    assert lines[-1] == "- and 60 more"


def test_rows_that_declare_more_than_can_be_decoded_one_by_one_are_refused_before_that(tmp_path, monkeypatch):
    monkeypatch.setattr("genlight.adapter.feed.sources.MOST_ROW_BYTES", 1 << 20)
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"id": [1], "text": ["x" * (2 << 20)]}), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 10_000
    with refusal(InputError):
        ArrowFeed(path).check()
    assert ArrowFeed(path, columns=["id"]).rows == 1
