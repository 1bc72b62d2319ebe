"""The queue on disk: what survives, what is left out, what is never written."""

import json
import os
import random
import subprocess
import sys
import textwrap
import threading

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import UploadError
from genlight.reporters.uploads.queue import (
    LOCK,
    MAX_RECEIPTS,
    Artifact,
    ArtifactFile,
    Description,
    Message,
    Queue,
    Receipt,
    UploadedFile,
    queue_of_run,
    read_description,
    read_entries,
)


@pytest.fixture
def open_queue(tmp_path):
    opened = []

    def build():
        opened.append(Queue(tmp_path / "uploads"))
        return opened[-1]

    yield build
    for queue in opened:
        queue.close()


def artifact(name="a"):
    """One file, called `name`."""
    return Artifact(name, (ArtifactFile(name, name, name, 1, 1),), 0, 1, name)


def metrics(value):
    return Message({"metrics": {"a": value}}, "key")


def _names(entries):
    """The value of metrics, or the name of a file, of each entry."""
    return [entry.body.payload["metrics"]["a"] if entry.kind == "metrics" else entry.body.main for entry in entries]


def _files(queue):
    return sorted(queue.directory.glob("0*.json"))


def test_entries_and_their_progress_survive_the_process(open_queue):
    queue = open_queue()
    first = queue.add("checkpoint", 1, artifact("1"))
    second = queue.add("checkpoint", 2, artifact("2"))
    second.parts["put:0"] = UploadedFile("x", "0", 1)
    queue.save(second)
    queue.remove(first)
    queue.add_receipt(Receipt("terminal", sha256="3"))
    queue.close()
    again = open_queue()
    (entry,) = again.entries()
    assert (entry.seq, entry.step, entry.parts) == (2, 2, {"put:0": UploadedFile("x", "0", 1)})
    assert again.receipt("terminal") == Receipt("terminal", sha256="3")
    assert again.receipt("another") is None
    assert again.add("sample", 5, artifact()).seq == 3


def test_a_failure_lasts_as_long_as_the_attempt(open_queue):
    queue = open_queue()
    entry = queue.add("checkpoint", 1, artifact())
    queue.fail(entry, "HTTP 400", auth=False)
    assert queue.head("checkpoint") is None
    assert read_entries(queue.directory)[0].failure == "HTTP 400"
    queue.close()
    assert open_queue().head("checkpoint").failure is None


def test_an_empty_file_as_a_power_cut_leaves_it_is_no_entry(open_queue):
    queue = open_queue()
    queue.add("metrics", 1, metrics(1))
    queue.add("metrics", 2, metrics(2))
    queue.close()
    _files(queue)[1].write_bytes(b"")
    again = open_queue()
    again.add("metrics", 3, metrics(3))
    assert _names(read_entries(queue.directory)) == [1, 3]


@pytest.mark.parametrize(
    "damage", [b'{"seq":1,"ki', b"\0" * 20, b'{"seq":2,"kind":"metrics","step":1,"body":{"metrics":{}}}']
)
def test_a_damaged_entry_is_an_error_that_names_the_file(open_queue, damage):
    queue = open_queue()
    queue.add("metrics", 1, metrics(1))
    queue.close()
    (path,) = _files(queue)
    path.write_bytes(damage)
    with pytest.raises(UploadError, match=f"The upload {path} is damaged"):
        open_queue()
    path.unlink()
    open_queue()  # the lock was given back


def test_entries_of_more_than_nine_digits_stay_in_order(open_queue):
    queue = open_queue()
    for seq in (999_999_999, 1_000_000_000):
        queue.add("sample", 1, artifact(str(seq)), seq=seq)
    assert _names(read_entries(queue.directory)) == ["999999999", "1000000000"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "part", "fail", "gone", "reopen"]), st.integers(0, 9))))
def test_a_reopened_queue_holds_what_the_open_one_held(operations):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        queue = Queue(folder)
        try:
            for operation, number in operations:
                entries = queue.entries()
                chosen = entries[number % len(entries)] if entries else None
                if operation == "add":
                    queue.add("sample", number, artifact(str(number)))
                elif operation == "reopen":
                    fresh = {"failure": None, "auth": False}
                    before = [msgspec.to_builtins(entry) | fresh for entry in entries]
                    queue.close()
                    queue = Queue(folder)
                    assert [msgspec.to_builtins(entry) | fresh for entry in queue.entries()] == before
                elif chosen is not None and operation == "part":
                    chosen.parts[f"put:{number}"] = UploadedFile(None, str(number), 1)
                    queue.save(chosen)
                elif chosen is not None and operation == "fail":
                    queue.fail(chosen, "why", auth=False)
                elif chosen is not None:
                    queue.remove(chosen)
        finally:
            queue.close()


def test_threads_that_add_and_remove_share_a_queue(open_queue):
    queue = open_queue()

    def work():
        for step in range(40):
            entry = queue.add("sample", step, artifact())
            if step % 2:
                queue.remove(entry)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({entry.seq for entry in queue.entries()}) == len(read_entries(queue.directory)) == 60


def test_what_a_full_disk_refused_is_held_and_written_once_there_is_room(open_queue, full_disk):
    queue = open_queue()
    sent, gone, _ = (queue.add("metrics", step, metrics(step)) for step in (1, 2, 3))
    with full_disk():
        sent.parts["post"] = None
        queue.save(sent)
        queue.remove(gone)
        queue.add("checkpoint", 4, artifact("4"))
        queue.add_receipt(Receipt("k"))
        assert "File too large" in str(queue.catch_up())
        held = _names(queue.entries())
        assert held == [1, 3, "4"]
        assert queue.receipt("k") == Receipt("k")
        assert _names(read_entries(queue.directory)) == [1, 3]
    queue.add("metrics", 5, metrics(5))

    assert queue.catch_up() is None
    assert _names(read_entries(queue.directory)) == _names(queue.entries()) == [*held, 5]
    assert read_entries(queue.directory)[0].parts == {"post": None}
    queue.close()
    assert open_queue().receipt("k") == Receipt("k")


def test_what_a_full_disk_refused_is_written_at_the_latest_when_the_queue_is_closed(open_queue, full_disk):
    queue = open_queue()
    with full_disk():
        queue.add("metrics", 1, metrics(1))
    queue.close()
    assert _names(read_entries(queue.directory)) == [1]


WRITER = textwrap.dedent(
    """
    import sys
    from genlight.reporters.uploads.queue import Artifact, ArtifactFile
    from genlight.reporters.uploads.queue import Message, Queue

    sample = Artifact("x" * 200, (ArtifactFile("a", "a", "a", 1, 1),), 0, 1, "a")
    queue = Queue(sys.argv[1])
    for step in range(int(sys.argv[2]), 10**9):
        queue.add(*(("metrics", step, Message({"x" * 200: 1.0}, "key")) if step % 3 else ("sample", step, sample)))
        print(step, flush=True)
    """
)


def test_what_was_added_before_a_kill_is_there_after_it(tmp_path):
    step = 0
    for lines in (60, 1, 130):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(step)], stdout=subprocess.PIPE)
        for _ in range(lines):
            step = int(writer.stdout.readline())
        writer.kill()
        seen = [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
        writer.wait()
        writer.stdout.close()
        step = max([step, *seen]) + 1
        steps = [entry.step for entry in read_entries(tmp_path)]
        assert steps[:step] == list(range(step))
        step = len(steps)  # one more may have been written than was told
    (tmp_path / ".tmp-000000001.json-1-x").touch()
    Queue(tmp_path).close()
    assert not list(tmp_path.glob(".tmp-*"))


def test_files_of_others_in_the_folder_of_a_queue_stay(tmp_path):
    (tmp_path / ".tmp-notes").write_text("mine")
    (tmp_path / ".tmp-folder").mkdir()
    (tmp_path / "notes.json").write_text("mine")
    Queue(tmp_path).close()
    assert (tmp_path / ".tmp-notes").read_text() == (tmp_path / "notes.json").read_text() == "mine"
    assert (tmp_path / ".tmp-folder").is_dir()


def test_a_queue_is_open_in_one_process_at_a_time_and_free_after_a_kill(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "0"], stdout=subprocess.PIPE)
    writer.stdout.readline()
    with pytest.raises(UploadError, match="in use by another run"):
        Queue(tmp_path)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    Queue(tmp_path).close()
    assert (tmp_path / LOCK).exists()


def test_the_description_tells_whose_queue_it_is(open_queue, tmp_path):
    queue = open_queue()
    queue.describe(Description("r", "me"))
    assert read_description(queue.directory).run_id == "r"
    with pytest.raises(UploadError, match="not an upload queue"):
        read_description(tmp_path)


def test_the_newest_receipts_are_kept(open_queue):
    queue = open_queue()
    folder = queue.directory / "delivered"
    for number in range(MAX_RECEIPTS + 2):
        (folder / f"{number}.json").touch()
        os.utime(folder / f"{number}.json", ns=(number, number))
    queue.close()
    open_queue()
    assert sorted(int(path.stem) for path in folder.iterdir()) == list(range(2, MAX_RECEIPTS + 2))


def test_a_receipt_that_cannot_be_read_counts_as_none(open_queue, caplog):
    queue = open_queue()
    queue.add_receipt(Receipt("k"))
    queue.close()
    (path,) = (queue.directory / "delivered").iterdir()
    path.write_bytes(random.Random(0).randbytes(30))
    assert open_queue().receipt("k") is None
    assert str(path) in caplog.text


def test_every_file_of_the_queue_is_json(open_queue):
    queue = open_queue()
    queue.add("metrics", 1, metrics(float("nan")))
    assert json.loads(_files(queue)[0].read_text())["body"]["payload"] == {"metrics": {"a": None}}


def test_a_run_gets_the_first_folder_in_which_no_other_run_waits(tmp_path, caplog):
    first = tmp_path / "uploads"
    assert queue_of_run(first, "a") == first
    queue = Queue(first)
    queue.describe(Description("a"))
    assert queue_of_run(first, "b") == first
    queue.add("metrics", 1, metrics(1))
    queue.close()
    assert queue_of_run(first, "b") == tmp_path / "uploads-2"
    assert queue_of_run(first, "a") == first
    assert "genlight uploads" in caplog.text
