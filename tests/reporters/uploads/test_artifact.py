"""What the queue remembers of an artifact's files, and the links that keep them."""

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from genlight.adapter.contract.exceptions import UploadError
from genlight.reporters.uploads.queue import LINKS, Artifact, Queue, pack


@pytest.fixture
def run(tmp_path):
    def write(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        return tmp_path

    return write


def names(artifact):
    return [(file.name, file.layout) for file in artifact.files]


def test_names_are_those_within_the_checkpoints_folder_and_the_record_is_last(run):
    root = run("c/final.json", "c/final~1/model.bin", "c/final~1/trainer/lora.bin")
    artifact = pack(root, root / "c/final.json", [root / "c/final~1"])
    assert names(artifact) == [
        ("model.bin", "final~1/model.bin"),
        ("trainer/lora.bin", "final~1/trainer/lora.bin"),
        ("final.json", "final.json"),
    ]
    assert artifact.subject == 2
    assert msgspec.convert(msgspec.to_builtins(artifact), Artifact) == artifact


def test_a_checkpoint_that_is_a_folder_has_its_files_and_no_single_subject(run):
    root = run("c/epoch=1.ckpt/a/b", "c/epoch=1.ckpt/meta")
    artifact = pack(root, root / "c/epoch=1.ckpt", [])
    assert [name for name, _ in names(artifact)] == ["meta", "a/b"]
    assert (artifact.subject, artifact.local_path) == (None, "c/epoch=1.ckpt")


def test_a_file_from_elsewhere_keeps_its_own_name_and_its_absolute_path(run, tmp_path_factory):
    root = run("c/step.json")
    other = tmp_path_factory.mktemp("other") / "extra.bin"
    other.touch()
    artifact = pack(root, root / "c/step.json", [], primary=other)
    assert (artifact.files[0].path, artifact.files[0].name) == (str(other), "extra.bin")
    assert artifact.local_path == str(other)
    assert artifact.files[artifact.subject].path == str(other)


def test_two_files_of_one_name_in_the_store_are_refused(run):
    root = run("c/step.json", "c/step/a_b", "c/step/a/b")
    with pytest.raises(UploadError, match="would have the same name"):
        pack(root, root / "c/step.json", [root / "c/step"])


def test_a_missing_file_is_an_error_that_names_it(run):
    root = run("c/step.json")
    with pytest.raises(UploadError, match=r"gone\.bin cannot be uploaded: No such file"):
        pack(root, root / "c/step.json", [root / "c/gone.bin"])


def test_a_change_of_a_file_is_noticed(run):
    root = run("c/step.json")
    (file,) = pack(root, root / "c/step.json", []).files
    assert file.is_unchanged(root)
    os.utime(root / "c/step.json", ns=(1, 1))
    assert not file.is_unchanged(root)
    (root / "c/step.json").unlink()
    assert not file.is_unchanged(root)


def test_links_keep_the_bytes_in_their_layout_until_the_entry_is_removed(run):
    root = run("c/step.json", "c/step/a/b", "elsewhere.bin")
    files = [root / "c/step/a/b", root / "elsewhere.bin", root / "c/step.json"]
    with contextlib.closing(Queue(root / "uploads")) as queue:
        entry = queue.add("checkpoint", 1, pack(root, root / "c/step.json", files))
        folder = queue.link_files(entry.seq, root / "c/step.json", files)
        for file in files:
            file.unlink()
        assert (folder / "step/a/b").read_text() == "c/step/a/b"
        assert (folder / "elsewhere.bin").read_text() == "elsewhere.bin"
        queue.remove(entry)
    assert os.listdir(root / "uploads" / LINKS) == []


def test_what_can_only_be_linked_in_part_is_not_linked_at_all(run):
    root = run("c/step.json")
    with contextlib.closing(Queue(root / "uploads")) as queue, pytest.raises(OSError, match="No such file"):
        queue.link_files(1, root / "c/step.json", [root / "c/step.json", root / "c/gone"])
    assert os.listdir(root / "uploads" / LINKS) == []


def test_links_of_a_process_that_was_killed_before_it_queued_them_are_dropped(
    chaos, uploader_for, write_checkpoint, tmp_path
):
    record, files = write_checkpoint(1)
    with contextlib.closing(Queue(tmp_path / "run" / "uploads")) as queue:
        orphan = queue.link_files(7, Path(record), [Path(record)])
    uploader = uploader_for(chaos, start=False)
    uploader.enqueue_checkpoint(record, files, step=1)
    uploader.close()
    assert not orphan.exists()
    record.unlink()
    uploader = uploader_for(chaos)
    assert uploader.settle().ok
    assert chaos.messages("/checkpoint")[0]["local_path"] == str(record)
    assert os.listdir(tmp_path / "run" / "uploads" / LINKS) == []


def test_where_nothing_can_be_kept_the_files_themselves_are_queued(
    chaos, uploader_for, write_checkpoint, tmp_path, caplog
):
    uploader = uploader_for(chaos)
    (tmp_path / "run" / "uploads" / LINKS).write_text("stands in the way")
    record, files = write_checkpoint(1)
    uploader.enqueue_checkpoint(record, files, step=1)
    assert uploader.settle().ok
    assert len(chaos.files()) == 3
    assert "can't be kept from being deleted" in caplog.text
