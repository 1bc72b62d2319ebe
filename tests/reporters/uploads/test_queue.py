"""The queue on disk: entries that survive, entries that are skipped, and values that are never written."""

import subprocess
import sys
import textwrap

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import StartupContractError, UploadError
from genlight.reporters.uploads.queue import DELIVERED, LOCK, Entry, File, Queue, UploadedFile, read_entries
from support.full_disk import full_disk
from support.messages import refusal


@pytest.fixture
def open_queue(tmp_path):
    opened = []

    def build():
        opened.append(Queue(tmp_path / "uploads"))
        return opened[-1]

    yield build
    for queue in opened:
        queue.close()


def entry(kind, step, name="a"):
    """An entry of a file called `name`, or of metrics with the step as their value."""
    if kind == "metrics":
        return Entry(run_id="r", kind=kind, step=step, to=("endpoint",), payload={"metrics": {"a": step}}, key="key")
    files = (File(name, name, 1, 1),)
    return Entry(run_id="r", kind=kind, step=step, to=("endpoint",), local_path=name, files=files)


def add(queue, *arguments):
    queue.add(added := entry(*arguments))
    return added


def _names(entries):
    """The step of metrics, or the name of a file, of each entry."""
    return [entry.step if entry.kind == "metrics" else entry.local_path for entry in entries]


def _files(queue):
    return sorted(queue.directory.glob("0*.json"))


def test_an_empty_file_as_a_power_cut_leaves_it_is_no_entry(open_queue):
    queue = open_queue()
    add(queue, "metrics", 1)
    add(queue, "metrics", 2)
    queue.close()
    _files(queue)[1].write_bytes(b"")
    add(open_queue(), "metrics", 3)
    assert _names(read_entries(queue.directory)) == [1, 3]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"seq":1,"ki',
        b"\0" * 20,
        b'{"seq":2,"kind":"metrics","step":1,"run_id":"r","to":["endpoint"]}',
        b'{"seq":1,"kind":"metrics","step":1,"run_id":"r","to":[]}',
        b'{"seq":1,"kind":"sample","step":1,"run_id":"r","to":["endpoint"]}',
    ],
)
def test_a_damaged_entry_is_an_error_that_names_the_file(open_queue, damage):
    queue = open_queue()
    add(queue, "metrics", 1)
    queue.close()
    (path,) = _files(queue)
    path.write_bytes(damage)
    with pytest.raises(UploadError, match=f"The upload {path} is damaged"):
        open_queue()
    path.unlink()
    open_queue()  # the lock was released


def test_entries_of_more_than_nine_digits_stay_in_order(open_queue):
    queue = open_queue()
    queue._next_seq = iter([999_999_999, 1_000_000_000])
    for name in ("first", "second"):
        add(queue, "sample", 1, name)
    assert _names(read_entries(queue.directory)) == ["first", "second"]


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
                    add(queue, "sample", number, str(number))
                elif operation == "reopen":
                    fresh = {"refused": False}
                    before = [msgspec.to_builtins(each) | fresh for each in entries]
                    queue.close()
                    queue = Queue(folder)
                    assert [msgspec.to_builtins(each) | fresh for each in queue.entries()] == before
                elif chosen is not None and operation == "part":
                    chosen.parts[f"put:{number}"] = UploadedFile(None, str(number), 1)
                    queue.save(chosen)
                elif chosen is not None and operation == "fail":
                    queue.refuse(chosen)
                elif chosen is not None:
                    queue.remove(chosen)
        finally:
            queue.close()


def test_what_a_full_disk_refused_is_held_and_written_once_there_is_room(open_queue):
    queue = open_queue()
    (queue.root / "4").touch()
    sent, gone, _ = (add(queue, "metrics", step) for step in (1, 2, 3))
    with full_disk():
        sent.parts["post"] = None
        queue.save(sent)
        queue.remove(gone)
        queue.finish(add(queue, "checkpoint", 4, "4"))
        add(queue, "checkpoint", 5, "5")
        assert "File too large" in str(queue.catch_up())
        held = _names(queue.entries())
        assert held == [1, 3, "5"]
        assert _names(queue.delivered("checkpoint")) == ["4"]
        assert _names(read_entries(queue.directory)) == [1, 3]
    add(queue, "metrics", 6)

    assert queue.catch_up() is None
    assert _names(read_entries(queue.directory)) == _names(queue.entries()) == [*held, 6]
    assert read_entries(queue.directory)[0].parts == {"post": None}
    assert _names(read_entries(queue.directory / DELIVERED)) == ["4"]
    with full_disk():
        add(queue, "metrics", 7)
    queue.close()
    assert _names(read_entries(queue.directory)) == [*held, 6, 7], "at the latest when the queue is closed"


WRITER = textwrap.dedent(
    """
    import sys
    from genlight.reporters.uploads.queue import Entry, File, Queue

    queue = Queue(sys.argv[1])
    for step in range(int(sys.argv[2]), 10**9):
        kind = "metrics" if step % 3 else "sample"
        fields = {"payload": {"x" * 200: 1.0}, "files": () if step % 3 else (File("a", "a", 1, 1),)}
        queue.add(Entry(run_id="r", kind=kind, step=step, to=("endpoint",), **fields))
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
        steps = [each.step for each in read_entries(tmp_path)]
        assert steps[:step] == list(range(step))
        step = len(steps)  # one more may have been written than was reported
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
    with refusal(StartupContractError) as refused:
        Queue(tmp_path)
    assert refused.value.code == "startup.artifacts_in_use"
    writer.kill()
    writer.wait()
    writer.stdout.close()
    Queue(tmp_path).close()
    assert (tmp_path / LOCK).exists()


def test_what_was_delivered_is_remembered_for_as_long_as_it_could_be_queued_again(open_queue):
    queue = open_queue()
    for name in ("kept", "pruned"):
        (queue.root / name).touch()
        queue.finish(add(queue, "checkpoint", 1, name))
    queue.finish(add(queue, "checkpoint", 2, "kept"))
    queue.finish(add(queue, "sample", 2, "kept"))
    assert [each.step for each in read_entries(queue.directory / DELIVERED)] == [1, 2]  # the newer one of "kept"
    (queue.root / "pruned").unlink()
    queue.close()
    assert _names(open_queue().delivered("checkpoint")) == ["kept"]
    assert _names(read_entries(queue.directory / DELIVERED)) == ["kept"]


def test_what_was_delivered_and_is_still_there_as_waiting_is_not_sent_again(open_queue):
    """A kill between the two writes leaves this state."""
    queue = open_queue()
    (queue.root / "a").touch()
    queue.finish(delivered := add(queue, "checkpoint", 1))
    queue.save(delivered)
    queue.close()
    (queue.directory / "000000001.json").write_bytes((queue.directory / DELIVERED / "000000001.json").read_bytes())
    assert open_queue().entries() == read_entries(queue.directory) == []


def test_entries_that_are_none_of_ours_stay_as_they_are(open_queue, tmp_path):
    queue = open_queue()
    (queue.root / "a").touch()
    add(queue, "checkpoint", 1)
    queue.close()
    before = sorted(path for path in queue.directory.rglob("0*"))
    other = Queue(queue.directory, lambda each: each.run_id == "q")
    with full_disk():
        other.add(Entry(run_id="q", kind="metrics", step=1, to=("endpoint",)))
    assert _names(other.foreign) == ["a"]
    other.remove(*other.entries())
    other.close()
    assert sorted(path for path in queue.directory.rglob("0*")) == before
