"""Which files paths, folders, patterns and URLs stand for."""

import os
import shutil

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from genlight.adapter import ArrowFeed
from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed.files import expand
from support.messages import refusal


def names(*given, **options):
    return [os.path.basename(file.path) for file in expand(list(given), **options)]


@pytest.mark.parametrize("begin", ["file://", "file://localhost", "file:", "FILE://"])
def test_a_file_url_may_be_escaped_as_others_write_it(rows_file, begin):
    path = rows_file(3, name="100% of it")
    assert path.as_uri().endswith("100%25%20of%20it.parquet")
    url = begin + path.as_uri().removeprefix("file://")
    assert [batch.num_rows for batch in ArrowFeed(url, epochs=1)] == [3]


@pytest.mark.parametrize("url", ["file://host/data.parquet", "file:data.parquet"])
def test_a_file_url_with_a_host_or_a_relative_path_is_refused(url):
    with refusal(InputError):
        expand(url)


def test_what_other_programs_leave_beside_the_data_in_a_folder_is_no_data(rows_file, tmp_path):
    rows_file(1, name="part-0")
    for beside in ("_metadata.parquet", "._part-0.parquet", "_temporary/0/part-1.parquet", ".git/x.parquet"):
        (tmp_path / beside).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / beside).write_bytes(b"no data")
    assert names(tmp_path) == ["part-0.parquet"]


def test_a_hidden_folder_that_is_named_is_read(rows_file, tmp_path):
    hidden = tmp_path / "_run" / ".cache"
    hidden.mkdir(parents=True)
    shutil.move(rows_file(1), hidden)
    assert names(hidden) == ["data.parquet"]


def test_folders_that_match_a_pattern_stand_for_the_files_in_them(rows_file, tmp_path):
    for folder in ("a.parquet", "b.parquet"):
        (tmp_path / folder).mkdir()
        shutil.move(rows_file(1, name=f"part-{folder[0]}"), tmp_path / folder)
    rows_file(1, name="c")
    assert names(str(tmp_path / "*.parquet")) == ["part-a.parquet", "part-b.parquet", "c.parquet"]
    assert names(str(tmp_path / "**" / "part-*")) == ["part-a.parquet", "part-b.parquet"]


def test_folders_that_match_a_pattern_of_a_url_stand_for_the_files_in_them():
    memory = fsspec.filesystem("memory")
    for path in ("/files/a.parquet/part-0.parquet", "/files/b.parquet"):
        memory.pipe_file(path, b"")
    try:
        assert names("memory://files/*.parquet") == ["part-0.parquet", "b.parquet"]
    finally:
        memory.rm("/files", recursive=True)


def test_a_missing_file_names_the_nearest_one_or_its_folder(rows_file, tmp_path):
    rows_file(1, name="train")
    for name, hint in [
        ("tran.parquet", "did you mean 'train.parquet'?"),
        ("x/y.parquet", f"there is no folder {tmp_path}/x"),
    ]:
        with pytest.raises(InputError) as caught:
            ArrowFeed(tmp_path / name).check()
        assert str(caught.value).endswith(f"{name} does not exist; {hint}")


def test_a_file_name_that_is_not_utf_8_is_refused_and_stands_in_nobody_elses_way(rows_file, tmp_path):
    shutil.move(rows_file(1, name="a"), os.fsencode(tmp_path) + b"/caf\xe9.parquet")
    rows_file(1, name="b")
    for given in (tmp_path / os.fsdecode(b"caf\xe9.parquet"), tmp_path):
        with pytest.raises(InputError, match=r"Unicode(En|De)codeError"):
            expand(given)
    assert names(str(tmp_path / "b*")) == ["b.parquet"]


class Refusing(MemoryFileSystem):
    """A store whose client has an exception of its own."""

    cachable = False

    def info(self, path, **options):
        raise LookupError("no credentials")


def test_whatever_a_file_system_raises_is_an_input_error_that_names_the_path():
    with refusal(InputError):
        expand("/bucket/data.parquet", filesystem=Refusing())
