"""The stored facts about an artifact's files, and the links that keep the files."""

import contextlib
import os

import pytest

from genlight.adapter.contract.exceptions import UploadError
from genlight.reporters.uploads.queue import LINKS, Entry, Queue, pack
from support.messages import refusal


@pytest.fixture
def run(tmp_path):
    def write(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        return tmp_path

    return write


def checkpoint(files, step=1):
    return Entry(run_id="r", kind="checkpoint", step=step, to=("endpoint",), local_path=files[-1].path, files=files)


def test_files_are_known_by_their_layout_and_the_record_is_last(run):
    root = run("c/final.json", "c/final~1/model.bin", "c/final~1/trainer/lora.bin")
    files = pack(root, root / "c/final.json", [root / "c/final~1", root / "c/final.json", root / "c/final~1/model.bin"])
    assert [file.layout for file in files] == ["final~1/model.bin", "final~1/trainer/lora.bin", "final.json"]
    assert checkpoint(files).subject == 2


def test_a_file_from_elsewhere_keeps_its_own_name_and_its_absolute_path(run, tmp_path_factory):
    root = run("c/step.json")
    other = tmp_path_factory.mktemp("other") / "extra.bin"
    other.touch()
    first, _ = pack(root, root / "c/step.json", [other])
    assert (first.path, first.layout) == (str(other), "extra.bin")


def test_two_files_of_one_name_in_the_store_are_refused(run):
    root = run("c/step.json", "c/step/a_b", "c/step/a/b")
    with refusal(UploadError):
        pack(root, root / "c/step.json", [root / "c/step"])


def test_a_missing_file_is_an_error_that_names_it(run):
    root = run("c/step.json")
    with refusal(UploadError):
        pack(root, root / "c/step.json", [root / "c/gone.bin"])


def test_links_keep_the_bytes_in_their_layout_until_the_entry_is_removed(run):
    root = run("c/step.json", "c/step/a/b", "elsewhere.bin")
    files = pack(root, root / "c/step.json", [root / "c/step/a/b", root / "elsewhere.bin"])
    with contextlib.closing(Queue(root / "uploads")) as queue:
        queue.add(entry := checkpoint(files))
        assert queue.unlinked_files() == set()
        for file in files:
            (root / file.path).unlink()
        assert [queue.location(entry, file).read_text() for file in files] == [
            "c/step/a/b",
            "elsewhere.bin",
            "c/step.json",
        ]
        queue.remove(entry)
    assert os.listdir(root / "uploads" / LINKS) == []


def test_what_can_only_be_linked_in_part_is_not_linked_at_all(run):
    root = run("c/step.json", "c/gone")
    files = pack(root, root / "c/step.json", [root / "c/gone"])
    (root / "c/gone").unlink()
    with contextlib.closing(Queue(root / "uploads")) as queue:
        queue.add(checkpoint(files))
        assert os.listdir(root / "uploads" / LINKS) == []
        assert queue.unlinked_files() == {root / "c/step.json", root / "c/gone"}


def test_links_that_a_killed_process_did_not_queue_are_dropped(chaos, uploader_for, write_checkpoint, tmp_path):
    record, files = write_checkpoint(1)
    orphan = tmp_path / "run" / "uploads" / LINKS / "000000007"
    orphan.mkdir(parents=True)
    os.link(record, orphan / record.name)
    uploader = uploader_for(chaos, start=False)
    uploader.enqueue("checkpoint", record, files, step=1)
    uploader.close()
    assert not orphan.exists()
    record.unlink()
    uploader = uploader_for(chaos)
    assert uploader.settle() is None
    assert chaos.messages("/checkpoint")[0]["local_path"] == str(record)
    assert os.listdir(tmp_path / "run" / "uploads" / LINKS) == []
