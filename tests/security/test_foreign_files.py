"""Files of others in a folder of checkpoints are neither parsed nor told of one by one, nor removed."""

from __future__ import annotations

import json
import os

import pytest

from genlight.callbacks.checkpoint import RecordMeta, save
from genlight.callbacks.checkpoint.format import record as record_module
from genlight.callbacks.checkpoint.format.record import record_paths
from genlight.callbacks.checkpoint.listing import list_checkpoints
from genlight.callbacks.checkpoint.selection import MOST_WARNINGS, newest_valid
from genlight.callbacks.checkpoint.storage import sweep

pytestmark = pytest.mark.promise(name="security")

FOREIGN = {
    "notes.json": b'{"a": 1}',
    "list.json": b"[1, 2]",
    "empty.json": b"",
    "step-7x.json": b"{}",
    "x.txt": b"text",
    "\udcff.json": b"\xff",
}


@pytest.fixture
def folder(tmp_path):
    for name, data in FOREIGN.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "theirs").mkdir()
    return tmp_path


def test_files_of_others_are_passed_over(folder):
    assert list_checkpoints(folder) == []
    assert newest_valid(folder) == (None, [])
    assert sweep(folder) == []
    assert {path.name for path in folder.iterdir()} == {*FOREIGN, "theirs"}


def test_records_are_found_among_them(folder):
    save(folder / "of-any-name", {"global_step": 2}, meta=RecordMeta(run_id="r"))
    (folder / "step-00000001.json").write_text(json.dumps({"step": 1, "state": {"a": 1}}, indent=2))

    assert [listed.path.name for listed in list_checkpoints(folder)] == ["step-00000001.json", "of-any-name.json"]
    assert newest_valid(folder)[0].step == 2


def test_of_many_files_of_others_none_is_parsed(tmp_path, monkeypatch):
    for number in range(2000):
        (tmp_path / f"foreign-{number}.json").write_text('{"a": 1}')
    monkeypatch.delattr(record_module.json, "loads")

    assert newest_valid(tmp_path) == (None, [])


def test_of_many_broken_records_a_few_are_named_and_the_others_counted(tmp_path):
    for number in range(500):
        (tmp_path / f"step-{number:08d}.json").write_text("{}")

    record, warnings = newest_valid(tmp_path)
    assert record is None
    assert len(warnings) == MOST_WARNINGS + 1
    assert "step-00000499 is broken" in warnings[0]
    assert warnings[-1] == f"490 more checkpoints in {tmp_path} are broken"


def test_a_device_or_a_pipe_of_that_name_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert record_paths(tmp_path) == []
    assert record_paths(tmp_path / "missing") == []
